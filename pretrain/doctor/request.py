"""What the doctor is asked. Imports nothing heavy: the command line needs it before torch is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pretrain.ranks.devices import VISIBLE, cpu_was_asked_for


@dataclass(frozen=True)
class Request:
    """What to check.

    Attributes:
        config, overrides: as `load_config`.
        timeout: seconds to wait for a rank, and for a check.
        gpus: that each node should have; None: as many as Slurm says it gave, or no expectation.
        digest_seconds: how long each rank regenerates frozen heads at most.
        report: where the JSON goes.
    """

    config: str
    overrides: tuple[str, ...] = ()
    timeout: float = 180
    gpus: int | None = None
    digest_seconds: float = 30
    report: Path | None = None

    def arguments(self) -> list[str]:
        """The words after `python -m pretrain doctor` that ask the same."""
        options = {
            "--timeout": self.timeout,
            "--gpus": self.gpus,
            "--digest-seconds": self.digest_seconds,
            "--report": self.report,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        return [*given, "--", self.config, *self.overrides]

    def expected_gpus(self) -> int | None:
        """GPUs that the node should show, or None if nobody says, or the run is to use none."""
        if self.gpus is not None or cpu_was_asked_for(os.environ.get(VISIBLE)):
            return self.gpus
        given = os.environ.get("SLURM_GPUS_ON_NODE", "")
        return int(given) if given.isdecimal() else None
