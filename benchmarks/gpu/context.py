"""The context of a stage (folder, deadline, commands), and its result.

Imports no torch: a stage starts processes of its own, so that one that breaks the GPU's context, or
hangs, takes nothing with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.io.files import write_json

ROOT = Path(__file__).resolve().parents[2]
TAIL = 60
"""Lines of a log that a report shows."""
TO_START = 25.0
"""Seconds for a process to import everything and, at its end, to write what it found."""


class StageError(Exception):
    """Failure or timeout of a stage's command, with the end of its log."""


@dataclass(frozen=True)
class StageResult:
    """The values that a stage measured, and its checks."""

    values: dict[str, Any]
    checks: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class StageContext:
    """The working directory of a stage, its deadline and its environment.

    Attributes:
        until: Deadline, a value of `time.monotonic`.
        small: Whether sizes are those for a CPU: the processes will find no GPU.
        at_once: Trainings that one stage starts at the same time.
    """

    work: Path
    shards: Path
    until: float
    small: bool
    at_once: int
    environment: Mapping[str, str]

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    @property
    def precision(self) -> list[str]:
        """Return the override of the dtype: bf16 where there are kernels for it."""
        return [f"precision.dtype={'fp32' if self.small else 'bf16'}"]

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def run(self, name: str, command: Sequence[str]) -> None:
        """Run a command to its end.

        Args:
            name: Name of the log.

        Raises:
            StageError: the command failed or ran out of the stage's time.
        """
        with self.started(name, command) as process:
            try:
                code = process.wait(max(0.1, self.seconds_left))
            except subprocess.TimeoutExpired:
                raise StageError(
                    f"{name}: the time of this stage was over:\n{self.tail(name)}"
                ) from None
        if code:
            raise StageError(f"{name} ended with {code}:\n{self.tail(name)}")

    def measure(self, name: str, module: str, *words: str) -> dict[str, Any]:
        """Run a module and return what it measured; an early exit is recorded as a failure.

        Args:
            name: Name of the log and of the JSON file.
            module: Module that is run with the options `--seconds` and `--json`.
            words: Further words of its command line.

        Raises:
            StageError: the module failed before it measured anything.
        """
        file = self.work / f"{name}.json"
        failure = None
        seconds = f"{max(1.0, self.seconds_left - TO_START):.0f}"
        options = ["--seconds", seconds, "--json", str(file)]
        try:
            self.run(name, [sys.executable, "-m", module, *words, *options])
        except StageError as error:
            failure = str(error)
            # What was measured before the failure is still worth reporting.
            if not file.exists():
                raise
        values: dict[str, Any] = json.loads(file.read_text())
        failed = values.setdefault("failed", {})
        if failure is not None:
            failed["the process itself"] = failure
        return values

    @contextmanager
    def started(self, name: str, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command and yield its process; kill the whole process group at the end.

        Args:
            name: Name of the log.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    # The command starts ranks of its own, which would survive a kill of the parent
                    # alone.
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def tail(self, name: str) -> str:
        """Return the end of a command's log."""
        lines = self._log(name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL:])

    def _log(self, name: str) -> Path:
        return self.work / f"{name}.log"


class StageReport:
    """The one report of all stages, written after each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.values: dict[str, Any] = {"stages": {}}

    def put(self, stage: str, entry: Mapping[str, Any]) -> None:
        """Put the report of a stage in, and write the file.

        Args:
            entry: State, seconds and findings of the stage.
        """
        self.values["stages"][stage] = dict(entry)
        self.write()

    def write(self) -> None:
        write_json(self._file, self.values)
