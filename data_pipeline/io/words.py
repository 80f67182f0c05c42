"""Output without control of the terminal: what a terminal would obey is shown as an escape.

Names and texts come from files that anybody may have made. An ESC in them would move the cursor,
set a window's title or fill the clipboard, and a bidirectional control would reorder the letters
that are shown.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

# Controls other than the ends of lines and tabs, invisible characters, bidirectional controls, and
# halves of surrogate pairs. The joiners U+200C and U+200D are spelling in some scripts.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def shown(text: str) -> str:
    """Return a text with escapes for what a terminal would obey; its lines stay."""
    if text.isprintable():
        return text
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shown_in_line(text: str) -> str:
    """Return a name or a sentence as `shown` does, in one line."""
    return shown(text).replace("\n", "\\n").replace("\t", "\\t")


@contextlib.contextmanager
def output_or_refusal() -> Iterator[None]:
    """Exit with a sentence and code 2 if standard output cannot be written, as if full."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at the very end
        reason = error.strerror
        print(f"error: standard output cannot be written ({reason})", file=sys.stderr, flush=True)
        sys.exit(2)


class WordStream:
    """Text stream that escapes everything written to it, as `shown` does.

    rich draws with escape sequences, so it must write to the stream below, which it looks for under
    the name `rich_proxied_file`. Texts are escaped when they are handed to rich.

    Args:
        stream: Standard output or error.

    Attributes:
        rich_proxied_file: The stream below.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # by which a library could write past this stream
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        """Write a text.

        Args:
            text: Text to write. A carriage return at its beginning, with which a bar redraws its
                line, is kept.

        Returns:
            Number of characters of `text`.
        """
        begin = "\r" if text.startswith("\r") else ""
        self.rich_proxied_file.write(begin + shown(text[len(begin) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines as they are."""
        for line in lines:
            self.write(line)


def guard_output() -> None:
    """Escape on standard output and error what a terminal would obey or cannot show."""
    _open_what_is_closed()
    sys.stdout = _guarded(sys.stdout)
    sys.stderr = _guarded(sys.stderr)


def _open_what_is_closed() -> None:
    """Open standard streams that came closed (`>&-`, some daemons) as the null device.

    Otherwise the next file to be opened would take their place, and receive what a library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (for good)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _guarded(stream: Any) -> Any:
    # Names may have letters that the terminal's encoding lacks.
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream if isinstance(stream, WordStream) else WordStream(stream)
