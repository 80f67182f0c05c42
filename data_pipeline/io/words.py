"""Words on their way out: what a terminal would obey is shown as an escape.

Names and texts come from files that anybody may have made. An ESC in them would move the cursor,
set a window's title or fill the clipboard, and a bidirectional control shows other letters than
there are.
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
    """Return a text as people should see it, of as many lines as it has."""
    if text.isprintable():
        return text
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown_in_line(text: str) -> str:
    """Return a name or a sentence as people should see it, in one line."""
    return shown(text).replace("\n", "\\n").replace("\t", "\\t")


@contextlib.contextmanager
def output_or_refusal() -> Iterator[None]:
    """End with a sentence and exit code 2 where standard output cannot be written, as if full."""
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
    """Text stream that passes on what it is given as `shown` returns it.

    What rich draws is made of escape sequences, and goes to the stream below: rich itself asks for
    that by the name `rich_proxied_file`. Its texts are shown when they are handed to rich.

    Args:
        stream: standard output or error.

    Attributes:
        rich_proxied_file: the stream below.
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
            text: what is written. A carriage return at its beginning, with which a bar renews its
                line, stays one.

        Returns:
            The number of its characters.
        """
        begin = "\r" if text.startswith("\r") else ""
        self.rich_proxied_file.write(begin + shown(text[len(begin) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines as they are."""
        for line in lines:
            self.write(line)


def guard_output() -> None:
    """Show on standard output and error, as escapes, what a terminal would obey or cannot show."""
    _open_what_is_closed()
    sys.stdout = _guarded(sys.stdout)
    sys.stderr = _guarded(sys.stderr)


def _open_what_is_closed() -> None:
    """Open standard streams that came closed (`>&-`, some daemons) as the null device.

    Otherwise a file that is opened next would take their place, and get what a library prints.
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
    if isinstance(stream, io.TextIOWrapper):  # names may have letters that a terminal lacks
        stream.reconfigure(errors="backslashreplace")
    return stream if isinstance(stream, WordStream) else WordStream(stream)
