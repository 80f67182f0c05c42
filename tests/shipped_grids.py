"""The grids that come with the program, each read and planned once for all tests of this process.

A plan checks the configuration of every run of its grid, which takes a second for the largest.
"""

from __future__ import annotations

from functools import cache

from laboratory.sweep.grid import GRIDS, Grid, read_grid
from laboratory.sweep.plan import PlannedRun, plan_sweep
from pretrain.config.sources import shipped_files


def shipped_grids() -> list[str]:
    return list(shipped_files(*GRIDS))


@cache
def shipped_grid(name: str) -> Grid:
    return read_grid(name)


@cache
def planned_runs(name: str) -> tuple[PlannedRun, ...]:
    """All runs of the grid, under its own directory: call it where no run of it has begun."""
    return tuple(plan_sweep(shipped_grid(name), None, [], lambda _: 1, check_data=False))
