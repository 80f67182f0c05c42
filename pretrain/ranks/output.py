"""Standard output and error that may go away without ending what shows itself there.

A training outlives its terminal: the reader of a pipe ends (`| head`, `| tee` at Ctrl-C), ssh
drops, the disk of a log file is full. Without this file the next line printed would end the
process, and everything since its last checkpoint would be lost.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from data_pipeline.io.words import guard_output


class Display:
    """A text stream that is given up, once and for all, when it can no longer be written.

    Args:
        stream: standard output or error.
        name: of the stream, for people.
        other: where the loss is told, once; None: nowhere.
    """

    def __init__(self, stream: TextIO, name: str, other: Display | None = None) -> None:
        self._stream = stream
        self._name = name
        self._other = other
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or nothing if the stream is gone.

        Args:
            text: to write.

        Returns:
            The number of characters, written or not.
        """
        if not self._gone:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: the stream has been closed
                self._give_up(error)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write lines as they are."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, unless it is gone."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Write to nowhere from now on; libraries that write to the descriptor do so, too."""
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
    """Let this process live on when nobody reads its standard output or error any more."""
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

    A stream that the signal has interrupted while it wrote must not be called again.
    """
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())
