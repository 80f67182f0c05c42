"""Progress of an evaluation on standard error: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import math
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_pipeline.io.words import shown_in_line

SECONDS_BETWEEN_LINES = 5.0
"""The least between two lines of a log file."""


class WorkDisplay:
    """Display of progress over work items, shown while entered as a context.

    Args:
        pieces: Number of work items.
    """

    def __init__(self, pieces: int) -> None:
        self._console = Console(file=sys.stderr)
        self._pieces = pieces
        self._done = 0
        self._last = -math.inf
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=pieces)

    def __enter__(self) -> WorkDisplay:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def begin(self, title: str) -> None:
        """Begin the next work item, described by `title`."""
        title = shown_in_line(title)
        self._bar.update(self._task, completed=self._done, description=title)
        self._done += 1
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self._console.print(
                f"{self._done}/{self._pieces}: {title}",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )
