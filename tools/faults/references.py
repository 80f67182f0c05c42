"""The undisturbed runs, one a layout: what disturbed ones must become, and their times."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import logged_steps
from tools.faults.inflict import NEVER, bytes_written, failing_storage, lines_in
from tools.faults.plan import LAYOUTS, STEPS, Layout, overrides_for
from tools.faults.starts import End, Start, run_start

PAGE = 4096


@dataclass(frozen=True)
class Reference:
    """The undisturbed run of a layout.

    Attributes:
        run: Directory of the run.
        start_seconds, step_seconds: up to the first step, and from one to the next.
        bytes_written: Bytes written by all its processes, into all its files.
    """

    run: Path
    start_seconds: float
    step_seconds: float
    bytes_written: int


@dataclass(frozen=True)
class Half:
    """Another run of the same training, stopped in order after `step`."""

    run: Path
    step: int


class References:
    """Cache of undisturbed runs, each made on first use; safe for threads.

    Args:
        made: Undisturbed runs that exist already.
    """

    def __init__(
        self,
        directory: Path,
        shards: Path,
        shim: Path | None,
        made: Mapping[Layout, Reference] | None = None,
    ) -> None:
        self._directory, self.shards, self._shim = directory, shards, shim
        self._whole = dict(made or {})
        self._halves: dict[Layout, Half] = {}
        self._locks = {layout: threading.Lock() for layout in LAYOUTS}

    def of(self, layout: Layout) -> Reference:
        """Return the undisturbed run of a layout.

        Raises:
            AssertionError: the run has failed, so there is nothing to compare with.
        """
        with self._locks[layout]:
            if layout not in self._whole:
                self._whole[layout] = self._make_whole(layout)
            return self._whole[layout]

    def half_of(self, layout: Layout) -> Half:
        """Return the stopped run of a layout.

        Raises:
            AssertionError: the run has not stopped when told to.
        """
        with self._locks[layout]:
            if layout not in self._halves:
                self._halves[layout] = self._make_half(layout)
            return self._halves[layout]

    def _make_whole(self, layout: Layout) -> Reference:
        directory = self._directory / layout.name / "whole"
        directory.mkdir(parents=True)
        run, counter = directory / "run", directory / "written"
        first_step = 0.0

        def watch(start: Start) -> None:
            nonlocal first_step
            start.until(lambda: lines_in(run / "metrics.jsonl") > 0)
            first_step = start.seconds

        environment = {}
        if self._shim is not None:
            environment = failing_storage(
                self._shim, directory, counter=counter, after=NEVER, error=0
            )
        overrides = overrides_for(layout, self.shards, directory)
        log = directory / "log"
        end = run_start(overrides, layout, run, log, disturb=watch, environment=environment)
        _require(end, f"the undisturbed run of {layout}", run, "finished")
        written = bytes_written(counter) if self._shim is not None else size_on_disk(run)
        return Reference(run, first_step, (end.seconds - first_step) / STEPS, written)

    def _make_half(self, layout: Layout) -> Half:
        directory = self._directory / layout.name / "half"
        directory.mkdir(parents=True)
        run = directory / "run"

        def stop_halfway(start: Start) -> None:
            if start.until(lambda: lines_in(run / "metrics.jsonl") > STEPS // 3):
                start.launcher.send_signal(signal.SIGUSR1)

        overrides = overrides_for(layout, self.shards, directory)
        end = run_start(overrides, layout, run, directory / "log", disturb=stop_halfway)
        _require(end, f"the stopped run of {layout}", run, "continue")
        return Half(run, max(logged_steps(run)))


def _require(end: End, title: str, run: Path, state: str) -> None:
    sentence = f"{title} ended with exit code {end.code} after {end.seconds:.0f} s:"
    assert end.code == 0 and not end.hung, f"{sentence}\n{end.output}\n{end.errors}"
    assert (run / "state").read_text() == f"{state}\n", f"{title} is not {state}"
    assert not end.left, f"{title} has left {', '.join(end.left)}"


def size_on_disk(directory: Path) -> int:
    """Return the bytes of a directory's files, in whole pages."""
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return sum(-(-size // PAGE) * PAGE for size in sizes)
