"""Bytes of a file as text: UTF-8, what a byte order mark says, and UTF-16 without a mark.

Any other encoding is named if it can be recognised, but never assumed: a wrong guess would train a
model on letters that nobody wrote.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from data_pipeline.sources.containers import DamageError
from data_pipeline.sources.formats import foreign_content

# The mark of UTF-32-LE begins with that of UTF-16-LE, so it is tried first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_GUESSED_BYTES = 1 << 16
_WINDOW_BYTES = 1 << 20
# Text holds tab, line ends, BEL and backspace, form feed and escape, but none of these.
_CONTROLS = bytes((*range(7), *range(14, 27)))
_CONTROL_SHARE = 0.01
# In UTF-16, half of the bytes of many scripts are NUL, or the number of the script; in UTF-8, none.
_UTF16_SHARE = 0.2
# In WINDOWS-1252 these are ¡ to ´, ¶, ·, ¹, º, ¼ to ¿, ×, ÷: no letters.
_SIGNS_IN_WORDS = re.compile(rb"[a-z][\xa1-\xb4\xb6\xb7\xb9\xba\xbc-\xbf\xd7\xf7][a-z]")


def decoded(chunks: Iterable[bytes | DamageError]) -> Iterator[str | DamageError]:
    """Decode the bytes of a file as they come, up to the first bytes that are lost.

    Returns:
        Fragments of the text, without a byte order mark; a `DamageError` last if bytes are lost or
        are not text.
    """
    decoder = None
    read = 0
    for window in _windows(chunks):
        if isinstance(window, DamageError):
            lost = window.detail.rpartition("; ")[0]
            yield DamageError(window.reason, f"{lost}; what follows is lost")
            return
        if decoder is None:
            if problem := _not_text(window):
                yield DamageError("damaged", problem)
                return
            encoding, mark = _encoding(window)
            decoder = codecs.getincrementaldecoder(encoding)()
            window = window[mark:]
            read = mark
        read += len(window)
        try:
            yield decoder.decode(window, final=not window)
        except UnicodeDecodeError as error:
            yield error.object[: error.start].decode(encoding)
            position = f"byte {read - len(error.object) + error.start:,} of the file"
            problem = "as which it begins"
            if encoding == "utf-8":
                problem = likely(error.object, error.start)
            detail = f"{position} is not valid {encoding.upper()}; {problem}; what follows is lost"
            yield DamageError("damaged", detail)
            return


def as_utf8(chunks: Iterator[bytes | DamageError]) -> Iterator[bytes | DamageError]:
    """Yield the bytes of a file of JSON lines, converted to UTF-8 if they are UTF-16 or UTF-32.

    A byte order mark tells the encoding, or a brace with a NUL beside it as the first character.
    """
    first = next((chunk for chunk in chunks if chunk), b"")
    whole = itertools.chain([first], chunks)
    if isinstance(first, bytes) and (foreign := foreign_content(first)):
        yield DamageError("damaged", f"the file is {foreign}")
        return
    encoding = "utf-8"
    if isinstance(first, bytes) and (_marked(first) or first[:2] in (b"{\0", b"\0{")):
        encoding, _ = _encoding(first)
    if encoding == "utf-8":
        yield from whole
        return
    for text in decoded(whole):
        yield text.encode() if isinstance(text, str) else text


def _windows(chunks: Iterable[bytes | DamageError]) -> Iterator[bytes | DamageError]:
    """Join chunks to windows; an empty window ends a file without damage."""
    joined: list[bytes] = []
    size = 0
    for chunk in chunks:
        if isinstance(chunk, DamageError):
            yield b"".join(joined)
            yield chunk
            return
        joined.append(chunk)
        size += len(chunk)
        if size >= _WINDOW_BYTES:
            yield b"".join(joined)
            joined = []
            size = 0
    if whole := b"".join(joined):
        yield whole
    yield b""


def _not_text(content: bytes) -> str | None:
    """Describe, as a clause, a file whose beginning is not text; None for text."""
    if foreign := foreign_content(content):
        return f"the file is {foreign}"
    if _encoding(content)[0] != "utf-8":
        return None
    beginning = content[:_GUESSED_BYTES]
    control = len(beginning) - len(beginning.translate(None, _CONTROLS))
    if control <= len(beginning) * _CONTROL_SHARE:
        return None
    return (
        f"{control / len(beginning):.0%} of the beginning of the file are control characters; it "
        "does not look like text of any encoding; if it is UTF-16, convert it: iconv -f UTF-16LE "
        "-t UTF-8 FILE > NEW"
    )


def _encoding(content: bytes) -> tuple[str, int]:
    """Return (encoding that bytes begin as, length of their byte order mark)."""
    return _marked(content) or (_unmarked_utf16(content) or "utf-8", 0)


def _marked(content: bytes) -> tuple[str, int] | None:
    marks = ((name, len(mark)) for mark, name in _MARKS if content.startswith(mark))
    return next(marks, None)


def likely(content: bytes, fault: int) -> str:
    """Return, as a clause, the likely encoding of bytes that are not UTF-8, and the remedy.

    Args:
        content: A line, or a part of a file.
        fault: Position of the first bytes that are not UTF-8.
    """
    decoded_text = content.decode(errors="surrogateescape")
    foreign = sum("\udc80" <= character <= "\udcff" for character in decoded_text)
    others = len(decoded_text) - foreign - sum(map(str.isascii, decoded_text))
    if others >= foreign:
        return (
            "other letters are UTF-8, so a part is in another encoding, often WINDOWS-1252, and "
            "converting all would mangle the rest; repair that part, or drop its bytes: iconv -c "
            "-f UTF-8 -t UTF-8 FILE > NEW"
        )
    start = max(0, fault - 1000)
    name = _guess(content[start : start + _GUESSED_BYTES])
    if name is None:
        return "it does not look like text of any encoding; is it another kind of file?"
    convert = f"iconv -f {name} -t UTF-8 FILE > NEW"
    return f"it looks like {name}; if all of the file does, convert it: {convert}"


def _unmarked_utf16(content: bytes) -> str | None:
    """Return the UTF-16 of bytes with more NULs or controls than other text has; None otherwise."""
    beginning = content[:_GUESSED_BYTES]
    # NULs are half of western text; controls are half of Greek, Russian and Arabic.
    for counted_bytes in (b"\x00", _CONTROLS):
        even, odd = (
            len(half) - len(half.translate(None, counted_bytes))
            for half in (beginning[::2], beginning[1::2])
        )
        many = even + odd > 0 and even + odd >= _UTF16_SHARE * len(beginning)
        if many and min(even, odd) <= max(even, odd) / 10:
            return "utf-16-le" if odd > even else "utf-16-be"
    return None


def _guess(content: bytes) -> str | None:
    """Return the likely encoding of bytes that are not UTF-8; None if they are no text."""
    if len(content.translate(None, _CONTROLS)) < len(content) * (1 - _CONTROL_SHARE):
        return None
    possible = ["cp1252"]
    if find_spec("charset_normalizer") is not None:
        from charset_normalizer import from_bytes

        # Of encodings that decode the bytes alike, its best match is the first in the alphabet.
        candidates = [name for match in from_bytes(content) for name in match.could_be_from_charset]
        possible = candidates or possible
    # Its first choice for western text may be one for eastern Europe, with letters for these signs.
    if "cp1252" in possible:
        possible = ["cp1250" if _SIGNS_IN_WORDS.search(content) else "cp1252"]
    return possible[0].upper().replace("_", "-").replace("CP125", "WINDOWS-125")
