"""Drills side by side: they mostly wait, for Slurm's timers and for ranks that start.

A drill is a function of `Drills` that submits jobs, does something to them and asserts what became
of them. `@drill(nodes=2)` makes it a test that starts nothing itself: before the first of them, all
the drills that this session has selected are started in a few threads, in their order; each test
then waits for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.slurm.drills import Drills

AT_ONCE = 5
"""Drills in flight. Most compute nothing; each start of a training takes a core for a while."""


@dataclass(frozen=True)
class Drill:
    """`script` on `nodes` nodes that are its own while it runs."""

    script: Callable[[Drills], None]
    nodes: int

    def run(self, drills: Drills) -> None:
        with drills.cluster.reserve(self.nodes) as nodes:
            self.script(replace(drills, nodes=nodes))


Started = dict[Drill, Future[None]]


def drill(nodes: int) -> Callable[[Callable[[Drills], None]], Callable[[Started], None]]:
    """The test that waits for a drill and fails as it failed."""

    def as_test(script: Callable[[Drills], None]) -> Callable[[Started], None]:
        this = Drill(script, nodes)

        def test(started_drills: Started) -> None:
            started_drills[this].result()

        test.__name__, test.__doc__ = script.__name__, script.__doc__
        test.drill = this  # type: ignore[attr-defined]
        return test

    return as_test


@contextmanager
def started(chosen: list[Drill], drills: Drills) -> Iterator[Started]:
    """All of them, `AT_ONCE` at a time. What has not begun at the end never begins."""
    pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="drill")
    try:
        yield {one: pool.submit(one.run, drills) for one in chosen}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
