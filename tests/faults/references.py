"""The undisturbed runs, one a layout: what the disturbed ones must become, and how long they take."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import logged_steps
from tests.faults.inflict import NEVER, bytes_written, failing_storage, lines_in
from tests.faults.plan import STEPS, Layout, overrides_for
from tests.faults.starts import End, Start, run_start

PAGE = 4096


@dataclass(frozen=True)
class Reference:
    """The undisturbed run of a layout.

    Attributes:
        run: its directory.
        start_seconds, step_seconds: up to the first step, and from one to the next.
        bytes_written: by all its processes, into all its files.
        half: the directory of another run of the same training, stopped in order after `half_step`.
    """

    run: Path
    start_seconds: float
    step_seconds: float
    bytes_written: int
    half: Path
    half_step: int


class References:
    """Makes each of them once, in `directory`; for several threads."""

    def __init__(self, directory: Path, shards: Path, shim: Path | None) -> None:
        self._directory, self._shards, self._shim = directory, shards, shim
        self._made: dict[Layout, Reference] = {}
        self._locks: dict[Layout, threading.Lock] = {}
        self._lock = threading.Lock()

    def of(self, layout: Layout) -> Reference:
        """Raises AssertionError: the undisturbed run has failed, so there is nothing to compare with."""
        with self._lock:
            own = self._locks.setdefault(layout, threading.Lock())
        with own:
            if layout not in self._made:
                self._made[layout] = self._make(layout)
            return self._made[layout]

    def _make(self, layout: Layout) -> Reference:
        whole, half = (self._directory / layout.name / name for name in ("whole", "half"))
        for directory in (whole, half):
            directory.mkdir(parents=True)
        first_step = 0.0

        def watch(start: Start) -> None:
            nonlocal first_step
            start.until(lambda: lines_in(start.run / "metrics.jsonl") > 0)
            first_step = start.seconds

        def stop_halfway(start: Start) -> None:
            if start.until(lambda: lines_in(start.run / "metrics.jsonl") > STEPS // 2):
                start.launcher.send_signal(signal.SIGUSR1)

        counter, environment = whole / "written", {}
        if self._shim is not None:
            environment = failing_storage(self._shim, whole, counter, NEVER, 0)
        overrides = overrides_for(layout, self._shards, whole)
        end = run_start(overrides, layout, whole / "run", whole / "log", watch, environment)
        _require(end, f"the undisturbed run of {layout}", whole / "run", "finished")
        step = (end.seconds - first_step) / STEPS
        written = bytes_written(counter) if self._shim is not None else size_on_disk(whole)
        overrides = overrides_for(layout, self._shards, half)
        end = run_start(overrides, layout, half / "run", half / "log", stop_halfway)
        _require(end, f"the stopped run of {layout}", half / "run", "continue")
        return Reference(
            whole / "run", first_step, step, written, half / "run", max(logged_steps(half / "run"))
        )


def _require(end: End, what: str, run: Path, state: str) -> None:
    said = f"{what} ended with exit code {end.code} after {end.seconds:.0f} s:\n{end.output}\n{end.errors}"
    assert end.code == 0 and not end.hung, said
    assert (run / "state").read_text() == f"{state}\n", f"{what} is not {state}"
    assert not end.left, f"{what} has left {', '.join(end.left)}"


def size_on_disk(directory: Path) -> int:
    """Bytes of its files, whole pages."""
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return sum(-(-size // PAGE) * PAGE for size in sizes)
