"""Checkpoints: how large, how long, and how often they pay (Young 1974, Daly 2006)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Saving:
    """What checkpoints cost.

    Attributes:
        seconds: to write one, while no step is made.
        best_seconds: the interval at which writing and work lost to failures cost least together, √(2 δ M)
            with δ the seconds of one and M the mean time between failures of the whole job.
        every_seconds: the configuration's interval; None: only at the end.
        lost, lost_at_best: parts of the time that go into writing and lost work.
    """

    bytes: int
    seconds: float
    failure_hours: float
    best_seconds: float
    best_steps: int
    every_steps: int
    every_seconds: float | None
    lost: float | None
    lost_at_best: float


def saving(
    size: int, every: int, step_seconds: float, nodes: int, write_gb_s: float, mtbf_hours: float
) -> Saving:
    """
    Args:
        size: bytes of one checkpoint.
        every: steps between two; 0: only at the end.
        write_gb_s: 1e9 bytes a second, of all ranks together.
        mtbf_hours: mean time between failures of one node.
    """
    seconds = size / (write_gb_s * 1e9)
    failure = mtbf_hours * 3600 / nodes
    best = math.sqrt(2 * seconds * failure)
    steps = max(1, round(best / step_seconds))
    interval = every * step_seconds if every else None

    def lost(after: float) -> float:
        return min(1.0, seconds / after + after / (2 * failure))

    return Saving(
        bytes=size,
        seconds=seconds,
        failure_hours=failure / 3600,
        best_seconds=steps * step_seconds,
        best_steps=steps,
        every_steps=every,
        every_seconds=interval,
        lost=None if interval is None else lost(interval),
        lost_at_best=lost(steps * step_seconds),
    )
