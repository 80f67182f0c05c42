"""The plan of a campaign: everything random in it, drawn from its seed and the case's number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.tiny import tiny_overrides

STEPS, SAVE_EVERY = 24, 3
SUSPENDED_SECONDS, OTHER_SECONDS = 10, 120
"""parallel.timeout_seconds where a rank or the disk stands, and else: ranks may start late."""


class Fault(Enum):
    """The kinds, with what the table calls them."""

    KILL_ONE = "SIGKILL of one rank"
    KILL_ALL = "SIGKILL of all"
    SUSPEND = "SIGSTOP of one rank"
    TERMINATE = "SIGTERM"
    CONTINUE = "SIGUSR1"
    DISK_FULL = "disk full"
    IO_ERROR = "EIO on write"
    FLIP = "flipped byte in a checkpoint"
    CUT = "truncated file in a checkpoint"
    OTHER_LAYOUT = "SIGKILL, then another layout"
    MARKER_LOST = "COMPLETE lost"
    STORAGE_STANDS = "file system that stops answering"
    CLOCK_BACK = "SIGKILL, then the clock set back"
    TWO_STARTERS = "SIGKILL, then two starts at once"
    DISPLAY_GONE = "display goes away"
    HANG_UP = "SIGHUP"
    RECORD_LOST = "COMPLETE and checkpoint.json lost"
    SETTINGS_LOST = "config.yaml or environment.json lost or cut"
    MARKER_STANDS = "COMPLETE does not answer"


DAMAGE = (
    Fault.FLIP,
    Fault.CUT,
    Fault.MARKER_LOST,
    Fault.RECORD_LOST,
    Fault.SETTINGS_LOST,
    Fault.MARKER_STANDS,
)
STORAGE = (Fault.DISK_FULL, Fault.IO_ERROR, Fault.STORAGE_STANDS)
WAITING = (Fault.SUSPEND, Fault.STORAGE_STANDS, Fault.MARKER_STANDS)
"""Faults that are told after parallel.timeout_seconds, which is short then."""


@dataclass(frozen=True)
class Layout:
    """A parallel layout of a run."""

    ranks: int
    tensor_parallel: int
    zero: int

    def __str__(self) -> str:
        data_parallel = self.ranks // self.tensor_parallel
        return f"TP {self.tensor_parallel} x DP {data_parallel}, ZeRO {self.zero}"

    @property
    def name(self) -> str:
        return f"ranks{self.ranks}-tp{self.tensor_parallel}-zero{self.zero}"


LAYOUTS = {
    Layout(2, 1, 1): 4,
    Layout(2, 1, 3): 4,
    Layout(2, 1, 2): 1,
    Layout(2, 2, 0): 1,
    Layout(3, 1, 1): 1,
    Layout(3, 1, 3): 1,
    Layout(4, 2, 1): 1,
    Layout(4, 2, 3): 1,
}
"""With the weights with which they are drawn: the start of a rank is what takes time."""


@dataclass(frozen=True)
class Case:
    """A fault. Values in [0, 1) are shares of a quantity that is known when the fault happens.

    Attributes:
        seed, number: Seed of the campaign, and number of the case in it.
        resumed: Whether the fault meets a run that goes on from a checkpoint, not one from nothing.
        in_start: Whether the fault comes before the first step of that start, not after.
        moment: Share of the time of the start, or of the steps that are trained.
        within: Share of the step in which the fault comes.
        rank: Number of the rank, for faults of one.
        whole_family: SIGKILL of all meets the ranks; else their launcher, and the kernel ends them.
            SIGHUP meets ranks and launcher, else the launcher. The display is that of errors too.
        offset: Share that selects a byte: of all that a run writes, or of a checkpoint's file.
        file: Share that selects a file of the checkpoint.
        bit: Number of the bit in that byte.
        then: Layout at which the run goes on.
    """

    seed: int
    number: int
    fault: Fault
    layout: Layout
    resumed: bool
    in_start: bool
    moment: float
    within: float
    rank: int
    whole_family: bool
    offset: float
    file: float
    bit: int
    then: Layout

    @property
    def name(self) -> str:
        return f"case_{self.seed}_{self.number:04d}"


def draw(seed: int, number: int) -> Case:
    """Draw a case: the kinds come in turn, so that all are as frequent.

    Args:
        number: Number of the case in it.
    """
    chance = random.Random(f"{seed}/{number}")
    fault = list(Fault)[number % len(Fault)]
    layout = _layout(chance)
    then = _layout(chance)
    while then == layout:
        then = _layout(chance)
    in_start = chance.random() < 0.25 and fault not in (Fault.SUSPEND, *STORAGE, *DAMAGE)
    return Case(
        seed=seed,
        number=number,
        fault=fault,
        layout=layout,
        resumed=fault in DAMAGE or chance.random() < (0.75 if in_start else 0.25),
        in_start=in_start,
        moment=chance.random(),
        within=chance.random(),
        rank=chance.randrange(layout.ranks),
        whole_family=chance.random() < 0.5,
        offset=chance.random(),
        file=chance.random(),
        bit=chance.randrange(8),
        then=then if fault is Fault.OTHER_LAYOUT else layout,
    )


def _layout(chance: random.Random) -> Layout:
    return chance.choices(list(LAYOUTS), list(LAYOUTS.values()))[0]


def overrides_for(layout: Layout, shards: Path, runs: Path) -> list[str]:
    """Return the overrides of all cases' run: frozen banks, dropout, asynchronous saves.

    Args:
        shards: Text to train on.
        runs: Parent directory of the run, which is its `run`.
    """
    return tiny_overrides(
        shards,
        runs,
        "run",
        attention__variant="orthogonal",
        data__global_batch_size=12,
        data__validate_every=8,
        schedule__steps=STEPS,
        checkpoint__every=SAVE_EVERY,
        checkpoint__keep_last=3,
        deepspeed__config=f"zero{layout.zero}",
        parallel__tensor_model_parallel_size=layout.tensor_parallel,
        parallel__timeout_seconds=OTHER_SECONDS,
    )
