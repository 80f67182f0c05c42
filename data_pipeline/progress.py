"""Progress of tokenising: a live line on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console

from data_pipeline.pool import Progress

_LOG_SECONDS = 10.0


class ProgressLine:
    """Adds up what the workers report and shows it on stderr while it is entered as a context."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._status = self._console.status("starting")
        self._started = self._logged = time.monotonic()
        self._documents = self._tokens = self._text_bytes = 0

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()

    def update(self, progress: Progress) -> None:
        """Take in one report; show a line if it is time."""
        self._documents += progress.documents
        self._tokens += progress.tokens
        self._text_bytes += progress.text_bytes
        line = f"{self.summary()}; reading {progress.file}"
        now = time.monotonic()
        if self._console.is_terminal:
            self._status.update(line)
        elif now - self._logged >= _LOG_SECONDS:
            self._logged = now
            self._console.print(line, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """Counts and rates so far."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        return (
            f"{self._documents:,} documents, {self._tokens:,} tokens, {self._text_bytes / 1e6:,.1f} MB "
            f"in {seconds:.1f} s "
            f"({self._tokens / seconds:,.0f} tokens/s, {self._text_bytes / 1e6 / seconds:.1f} MB/s)"
        )
