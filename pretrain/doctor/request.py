"""The request to the doctor, without heavy imports: the command line needs it before torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pretrain.ranks.devices import VISIBLE, cpu_was_asked_for


class Difference(str, Enum):
    """Difference between nodes that need not keep them from training together."""

    CLOCK = "clock"
    DRIVER = "driver"


@dataclass(frozen=True)
class Request:
    """The arguments of `python -m pretrain doctor`.

    Attributes:
        config: name or file of the configuration.
        overrides: section.key=value.
        timeout: seconds to wait for a rank, and for a check.
        gpus: expected number of GPUs of each node; None: as many as Slurm allocated, or any.
        allow: differences for which no node is left out.
        report: file for the results as JSON.
    """

    config: str
    overrides: tuple[str, ...] = ()
    timeout: float = 180
    gpus: int | None = None
    allow: tuple[Difference, ...] = ()
    report: Path | None = None

    def arguments(self) -> list[str]:
        """Return the command-line arguments of `python -m pretrain doctor` for the same request."""
        options = {
            "--timeout": self.timeout,
            "--gpus": self.gpus,
            "--report": self.report,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        given += [f"--allow={one.value}" for one in self.allow]
        return [*given, "--", self.config, *self.overrides]

    def expected_gpus(self) -> int | None:
        """Return the number of GPUs that the node should have.

        None if not stated, or for a CPU run.
        """
        if self.gpus is not None or cpu_was_asked_for(os.environ.get(VISIBLE)):
            return self.gpus
        given = os.environ.get("SLURM_GPUS_ON_NODE", "")
        return int(given) if given.isdecimal() else None
