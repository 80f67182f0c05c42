"""Bytes of a file as text: UTF-8, what a byte order mark says, and UTF-16 without a mark.

Every other encoding is named as far as it can be told, and not guessed at: a wrong guess trains a
model on letters that nobody wrote.
"""

from __future__ import annotations

import codecs
import re
from importlib.util import find_spec

from data_pipeline.sources.formats import foreign_content

# The mark of UTF-32-LE begins as that of UTF-16-LE does, so it is asked for first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_GUESSED_BYTES = 1 << 16
# In UTF-16, half of the bytes of western text are NUL; in UTF-8, none is.
_NUL_SHARE = 0.2
# In WINDOWS-1252 these are ¡ to ´, ¶, ·, ¹, º, ¼ to ¿, ×, ÷: no letters.
_SIGNS_IN_WORDS = re.compile(rb"[a-z][\xa1-\xb4\xb6\xb7\xb9\xba\xbc-\xbf\xd7\xf7][a-z]")


class NotTextError(ValueError):
    """Bytes that are no text of a known encoding; the message says what they look like."""


def decode(content: bytes) -> str:
    """Decode the bytes of a file.

    Args:
        content: all bytes of the file.

    Returns:
        The text, without a byte order mark.

    Raises:
        NotTextError: it is another kind of file, or of an encoding that cannot be told.
    """
    if foreign := foreign_content(content):
        raise NotTextError(f"the file is {foreign}")
    encoding = marked(content) or _unmarked_utf16(content) or "utf-8"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        place = f"byte {error.start:,} of the file is not valid {name}"
        if encoding != "utf-8":
            raise NotTextError(f"{place}, as which it begins; the file may be cut short") from None
        raise NotTextError(f"{place}; {likely(content[max(0, error.start - 1000) :])}") from None


def marked(content: bytes) -> str | None:
    """Return the encoding that a byte order mark says; None without a mark."""
    return next((name for mark, name in _MARKS if content.startswith(mark)), None)


def likely(content: bytes) -> str:
    """Say, as a clause, which encoding bytes that are not UTF-8 are likely of, and the remedy."""
    name = _guess(content[:_GUESSED_BYTES])
    if name is None:
        return "it does not look like text of any encoding; is it another kind of file?"
    return f"it looks like {name}; convert it: iconv -f {name} -t UTF-8 FILE > NEW"


def _unmarked_utf16(content: bytes) -> str | None:
    """Return which UTF-16 bytes are of that hold as many NULs as no other text does."""
    beginning = content[:_GUESSED_BYTES]
    even = beginning[::2].count(0)
    odd = beginning[1::2].count(0)
    if (
        len(content) % 2
        or even + odd < _NUL_SHARE * len(beginning)
        or min(even, odd) > max(even, odd) / 10
    ):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def _guess(content: bytes) -> str | None:
    """Return the likely encoding of bytes that are not UTF-8; None if they are no text."""
    control = sum(content.count(byte) for byte in (*range(7), *range(14, 27)))
    if control > len(content) / 100:
        return None
    possible = ["cp1252"]
    if find_spec("charset_normalizer") is not None:
        from charset_normalizer import from_bytes

        # Of those that decode the bytes alike, it names the first in the alphabet.
        found = [name for match in from_bytes(content) for name in match.could_be_from_charset]
        possible = found or possible
    # Its first choice for western text is one for eastern Europe, whose letters are signs here.
    if "cp1252" in possible:
        possible = ["cp1250" if _SIGNS_IN_WORDS.search(content) else "cp1252"]
    return possible[0].upper().replace("_", "-").replace("CP125", "WINDOWS-125")
