"""Kinds of Slurm job: a training run, or a task of a tokenize array.

Both have a directory, a `title` for logs, a directory for the `records` and logs of segments, and
three methods: `written` marks what says how the segment before ended, so that it does not pass for
the end of this one; `reached` is a number that grows when a restart would begin later than the last
one did (the newest complete checkpoint's step, or the number of finished units); `outcome` is
FINISHED, CONTINUE, STOPPED or CRASHED, after the processes ended with an exit code, given that
mark.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from data_pipeline.errors import DataError
from data_pipeline.tokenizing.plan import read_plan
from pretrain.reporting.log_errors import error_lines
from pretrain.runs.directory import CONTINUE, FINISHED, STOPPED, RunDirectory

CRASHED = "crashed"


@dataclass(frozen=True)
class Training:
    """A training run; the state in its directory outranks the exit code."""

    directory: Path

    @property
    def title(self) -> str:
        return str(self.directory)

    @property
    def records(self) -> Path:
        return self.directory / "slurm"

    def written(self) -> str:
        try:
            return str(os.stat(RunDirectory(self.directory).state_file).st_mtime_ns)
        except FileNotFoundError:
            return ""

    def reached(self) -> int:
        return RunDirectory(self.directory).trained_steps()

    def outcome(self, exit_code: int, earlier_mark: str) -> str:
        state = RunDirectory(self.directory).state() if self.written() != earlier_mark else None
        return state if state in (FINISHED, CONTINUE, STOPPED) else CRASHED


@dataclass(frozen=True)
class Tokenizing:
    """Task `index` of `count` tasks that fill a shard directory.

    It may be ended at any time and loses at most one work item.
    """

    directory: Path
    index: int
    count: int

    @property
    def title(self) -> str:
        return f"{self.directory}, task {self.index} of {self.count},"

    @property
    def records(self) -> Path:
        """Return a directory beside the shards: tokenize wants its directory for itself."""
        return self.directory.with_name(f"{self.directory.name}-slurm") / f"task_{self.index:04d}"

    def written(self) -> str:
        """Return nothing: the finished units are the only state of a task."""
        return ""

    def reached(self) -> int:
        try:
            _, units = read_plan(self.directory)
        except DataError:
            return 0  # no task has written the plan yet
        return sum(unit.record_path.is_file() for unit in units[self.index :: self.count])

    def outcome(self, exit_code: int, earlier_mark: str) -> str:
        return FINISHED if exit_code == 0 else CRASHED


JobKind: TypeAlias = Training | Tokenizing


def errors_in(logs: Path) -> list[str]:
    """Return the first five sentences that ranks ended with, each once, with the log of each."""
    sentences: dict[str, str] = {}
    for path in sorted(logs.glob("*.log")):
        for line in error_lines(path.read_text(errors="replace").splitlines()):
            sentences.setdefault(line, f"{path.name}: {line}")
    return list(sentences.values())[:5]
