"""The request to the doctor, without heavy imports: the command line needs it before torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pretrain.ranks.devices import VISIBLE, cpu_was_asked_for


class Difference(str, Enum):
    """A difference between nodes that does not keep them from training together."""

    CLOCK = "clock"
    DRIVER = "driver"


@dataclass(frozen=True)
class Request:
    """The arguments of `python -m pretrain doctor`.

    Attributes:
        config: Name or file of the configuration.
        overrides: section.key=value.
        timeout: Seconds to wait for a rank, and for a check.
        gpus: Expected number of GPUs per node; None: as many as Slurm allocated, or any.
        allow: Differences for which no node is left out.
        report: File for the results as JSON.
    """

    config: str
    overrides: tuple[str, ...] = ()
    timeout: float = 180
    gpus: int | None = None
    allow: tuple[Difference, ...] = ()
    report: Path | None = None

    def expected_gpus(self) -> int | None:
        """Return the number of GPUs of the node; None if it is not stated, or for a CPU run."""
        if self.gpus is not None or cpu_was_asked_for(os.environ.get(VISIBLE)):
            return self.gpus
        gpus_on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
        return int(gpus_on_node) if gpus_on_node.isdecimal() else None
