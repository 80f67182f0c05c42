"""Progress of tokenising: a live bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from data_pipeline.pool import Progress

LOG_SECONDS = 10.0


class ProgressLine:
    """Adds up what the workers report and shows it on stderr while it is entered as a context.

    total_bytes: of the inputs as they lie on disk; the time that is left follows from the rate over them.
    """

    def __init__(self, total_bytes: int, log_seconds: float = LOG_SECONDS) -> None:
        self._console = Console(file=sys.stderr)
        self._bar = Bar(BarColumn(), TextColumn("{task.description}"), console=self._console, transient=True)
        self._job = self._bar.add_task("starting", total=max(1, total_bytes))
        self._total_bytes = total_bytes
        self._log_seconds = log_seconds
        self._started = self._logged = time.monotonic()
        self._documents = self._tokens = self._text_bytes = self._input_bytes = self._skipped_bytes = 0

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Take in one report; show a line if it is time."""
        self._documents += progress.documents
        self._tokens += progress.tokens
        self._text_bytes += progress.text_bytes
        self._input_bytes += progress.input_bytes
        self._skipped_bytes += progress.skipped_bytes
        now = time.monotonic()
        line = f"{self.summary()}; {self.time_left(now - self._started)}"
        done = self._input_bytes + self._skipped_bytes
        self._bar.update(self._job, completed=done, description=line)
        if not self._console.is_terminal and now - self._logged >= self._log_seconds:
            self._logged = now
            share = done / max(1, self._total_bytes)
            self._console.print(
                f"{share:.1%}: {line}; reading {progress.file}", highlight=False, soft_wrap=True
            )

    def time_left(self, seconds: float) -> str:
        """`ETA 1:02:03` at the rate over the inputs read in `seconds`; those finished before do not count."""
        left = self._total_bytes - self._input_bytes - self._skipped_bytes
        if not self._input_bytes:
            return "ETA unknown"
        whole = round(left * seconds / self._input_bytes)
        return f"ETA {whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"

    def summary(self) -> str:
        """Counts and rates so far."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        return (
            f"{self._documents:,} documents, {self._tokens:,} tokens, {self._text_bytes / 1e6:,.1f} MB "
            f"in {seconds:.1f} s "
            f"({self._tokens / seconds:,.0f} tokens/s, {self._text_bytes / 1e6 / seconds:.1f} MB/s)"
        )
