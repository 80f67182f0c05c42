"""Progress of long work: a live bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from data_pipeline.io.pool import Progress
from data_pipeline.io.words import shown_in_line

LOG_SECONDS = 10.0


def time_left(seconds: float, done: int, left: int) -> str:
    """Return the time left in words, `ETA 1:02:03`.

    Args:
        seconds: Seconds that the work took so far.
        done: Bytes done.
        left: Bytes left.
    """
    if not done:
        return "ETA unknown"
    whole_seconds = round(left * seconds / done)
    return f"ETA {whole_seconds // 3600}:{whole_seconds // 60 % 60:02d}:{whole_seconds % 60:02d}"


class ProgressLine:
    """Context that shows the progress of tokenising on stderr, from the workers' reports.

    The time left is extrapolated from the input bytes read per second; inputs that an earlier run
    finished do not count for that rate.

    Args:
        log_seconds: Seconds between two lines in a log.

    Attributes:
        total_bytes: Bytes of the inputs on disk; 0 while they are not known.
    """

    def __init__(self, log_seconds: float = LOG_SECONDS) -> None:
        self._console = Console(file=sys.stderr)
        # The text comes first and the bar gets the rest of 80 columns: share and time matter more.
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=8),
        )
        self._bar = Bar(*columns, console=self._console, transient=True)
        self._job = self._bar.add_task("starting", total=None)
        self._log_seconds = log_seconds
        self._started = self._logged = time.monotonic()
        self._lock = threading.Lock()  # shards are joined by threads
        self.total_bytes = 0
        self._done: Counter[str] = Counter()
        self._joining_since = 0.0

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:  # stopping it would leave an empty line in a log
            self._bar.stop()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return max(time.monotonic() - self._started, 1e-9)

    def show(self, text: str, done: int, total: int, left: str, log: str = "") -> None:
        """Show the share, the time left and a text on the bar, or now and then in a log.

        Args:
            text: Text on the bar.
            done: Bytes or tokens done; 100 % is shown only when all are.
            total: Bytes or tokens in all.
            left: Time left, as `time_left` returns it.
            log: Text for a log, in place of `text`.
        """
        share = "100.0%" if done >= total else f"{min(done / total, 0.999):.1%}"
        # The size of a data set is not known.
        prefix = f"{share}, {left}: " if total else ""
        described = shown_in_line(f"{prefix}{text}")
        self._bar.update(self._job, completed=done, total=max(1, total), description=described)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._logged >= self._log_seconds:
            self._logged = now
            line = shown_in_line(f"{prefix}{log or text}")
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def update(self, progress: Progress) -> None:
        """Add a report; show a line if it is time."""
        with self._lock:
            counts = {name: value for name, value in vars(progress).items() if name != "file"}
            self._done.update(counts)
            if progress.tokens_to_join:
                self._joining_since = time.monotonic()
            if self._done["tokens_to_join"]:
                self._show_joining()
            else:
                self._show_units(progress.file)

    def _show_units(self, file: str) -> None:
        done = self._done["input_bytes"] + self._done["skipped_bytes"]
        seconds = self.seconds()
        left = time_left(seconds, self._done["input_bytes"], self.total_bytes - done)
        tokens = self._done["tokens"]
        rates = f"{tokens / seconds:,.0f}/s, {self._done['text_bytes'] / 1e6 / seconds:.1f} MB/s"
        text = f"{tokens:,} tokens, {rates}"
        log = self.summary() + (f"; reading {file}" if file else "")
        self.show(text, done, self.total_bytes, left, log=log)

    def _show_joining(self) -> None:
        joined = self._done["joined_tokens"]
        total = self._done["tokens_to_join"]
        left = time_left(time.monotonic() - self._joining_since, joined, total - joined)
        self.show(f"{joined:,} of {total:,} tokens joined to shards", joined, total, left)

    def summary(self, before_rates: str = " ") -> str:
        """Return counts and rates so far, in words."""
        seconds = self.seconds()
        tokens = self._done["tokens"]
        megabytes = self._done["text_bytes"] / 1e6
        return (
            f"{self._done['documents']:,} documents, {tokens:,} tokens, {megabytes:,.1f} MB"
            f"{before_rates}in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s, "
            f"{megabytes / seconds:.1f} MB/s)"
        )
