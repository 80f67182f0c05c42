"""Standard output and error that may fail without ending the process.

A training outlives its terminal: the reader of a pipe ends (`| head`, `| tee` at Ctrl-C), ssh
drops, the disk of a log file is full. Without this file the next printed line would end the
process, and the steps since the last checkpoint would be lost.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from data_pipeline.io.words import guard_output


class Display:
    """A text stream that discards everything after the first failed write.

    Args:
        stream: Standard output or standard error.
        name: Name of the stream for messages.
        other: Stream that gets one warning about the loss; None: no warning.
    """

    def __init__(self, stream: TextIO, name: str, other: Display | None = None) -> None:
        self._stream = stream
        self._name = name
        self._other = other
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text unless the stream is gone; return its length in either case."""
        self._try(self._stream.write, text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write lines without adding separators."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, unless it is gone."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., object], *arguments: str) -> None:
        if not self._gone:
            try:
                action(*arguments)
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Discard all output from now on, also that of libraries that write to the descriptor."""
        self._gone = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._other is not None:
            why = getattr(error, "strerror", None) or str(error)
            self._other.write(
                f"warning: {self._name} cannot be written any more ({why}); the work continues "
                "without it\n"
            )
            self._other.flush()


def outlive_output() -> None:
    """Keep this process alive when its standard output or error can no longer be written."""
    guard_output()
    stdout: Any = sys.stdout
    stderr: Any = sys.stderr
    if isinstance(stdout.rich_proxied_file, Display):
        return
    stderr.rich_proxied_file = Display(stderr.rich_proxied_file, "standard error")
    stdout.rich_proxied_file = Display(
        stdout.rich_proxied_file, "standard output", other=stderr.rich_proxied_file
    )


def say_at_once(text: str) -> None:
    """Write a line to standard output from a signal handler, if it can be written.

    Writes to the descriptor, because the signal may have interrupted the stream's own write.
    """
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())
