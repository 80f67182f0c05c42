"""Readers of documents from input files, and of the lines that are not documents.

A line that is not a usable record does not stop the reading: a `Reject` takes its place. Damage of
the file itself is a `Reject` too, with `lost` set.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from data_pipeline.errors import NoTextColumn, needs_extra
from data_pipeline.io.files import refusing
from data_pipeline.sources.containers import (
    DamageError,
    HashedStream,
    chunks_of,
    hash_of,
    lines_of,
)
from data_pipeline.sources.discovery import InputFile, RecordKeys
from data_pipeline.sources.encodings import NotTextError, decode, likely, marked
from data_pipeline.sources.formats import Format, Packing, format_of

# From here on a document is worth a note: it may be a whole log file or a data dump.
LONG_BYTES = 10_000_000
# A .txt of more characters, such as a novel, is cut into documents up to this size: at blank lines;
# where more text than this has no blank line, at the end of a line; and in a longer line, at the
# end of a sentence, at a space, or anywhere.
TEXT_CHARACTERS = 1 << 14
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_ENDS = (
    _BLANK_LINES,
    re.compile(r"\n(?:[ \t]*\n)*"),
    re.compile(r"(?<=[.!?]) |(?<=[。！？])"),
    re.compile(r"[ \t]"),
)
_DELIMITERS = ",;\t|"
_END_OF_TABLE = "\x03end of the table\x03"
"""Last row behind a table, which a quote that is never closed takes in."""
_PARQUET_ROWS = 512
# Reasons that concern a file and not a line.
LOST = ("truncated", "damaged")
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """Document of a source.

    Attributes:
        id: `FILE:LINE` with the input's name, for messages.
        key: of its record that the text is of; "" where there are no records.
    """

    text: str
    source: str
    id: str
    key: str = ""


@dataclass(frozen=True)
class Reject:
    """Line or row that is unusual.

    Attributes:
        line: its number in the file, from 1.
        reason: one of those in docs/data-format.md.
        detail: what exactly is wrong.
        kept: the document is unusual but usable and follows; otherwise there is none.
    """

    line: int
    reason: str
    detail: str
    kept: bool = False

    @property
    def lost(self) -> bool:
        """Return whether this is not a line but an unreadable part of the file."""
        return self.reason in LOST


class RecordReader:
    """Iterable over an input: `Document`s and `Reject`s, in order. Blank lines are skipped.

    A file that cannot be read at all is a DataError: a failing disk is not a hostile line.

    Args:
        file: the input.
        keys: where its records hold text and source.
    """

    def __init__(self, file: InputFile, keys: RecordKeys) -> None:
        self.lines = 0
        self._file = file
        self._keys = keys
        self._stream: HashedStream | None = None
        self._rows = 0  # of a parquet file
        self._done = False
        self._sha256: str | None = None

    def input_bytes(self) -> int:
        """Return how many bytes of the input, as it lies on disk, have been read."""
        if self._done:
            return self._file.size
        if self._rows:
            return self._file.size * self.lines // self._rows
        return self._stream.hashed if self._stream is not None else 0

    def sha256(self) -> str:
        """Return the SHA-256 of the input.

        After everything has been read this costs no second reading, except of a parquet file on
        disk.
        """
        if self._sha256 is None:
            self._sha256 = hash_of(self._file)
        return self._sha256

    def __iter__(self) -> Iterator[Document | Reject]:
        found = format_of(self._file.name) or Format("lines")
        with refusing(f"read {self._file.path}"):
            if found.kind == "parquet":
                with self._whole() as whole:
                    yield from self._parquet(whole)
            else:
                with self._file.open() as raw:
                    self._stream = stream = HashedStream(raw, self._file.size)
                    if found.kind == "lines":
                        yield from self._json_lines(_utf8(lines_of(stream, found.packing)))
                    else:
                        read = self._csv if found.kind == "csv" else self._text
                        yield from self._decoded(stream, found.packing, read)
                    self._sha256 = stream.hexdigest()
            self._file.check_unchanged()
        self._done = True

    def _json_lines(
        self, lines: Iterable[bytes | DamageError], broken: bool = False
    ) -> Iterator[Document | Reject]:
        first = True
        for line in lines:
            if isinstance(line, DamageError):
                yield Reject(self.lines + 1, line.reason, line.detail)
                broken = True  # what follows may begin in the middle of a line
                continue
            if first:
                line = line.removeprefix(_UTF8_MARK)
                first = False
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if b"\r" in line.strip():  # lines that end as on the old Mac
                    yield from self._json_lines(line.split(b"\r"), broken)
                    broken = False
                    continue
                if broken:
                    broken = False
                    continue
                self.lines += 1
                if line.strip():
                    yield from self._lenient(line, error)
                continue
            self.lines += 1
            broken = False
            yield from self._checked(record)

    def _lenient(self, line: bytes, error: orjson.JSONDecodeError) -> Iterator[Document | Reject]:
        """Read a line that is not strict JSON: a document if only other fields are to blame."""
        reason, detail = _json_fault(line, error)
        records: list[Document | Reject] = []
        if reason in ("lone_surrogate", "bad_json"):
            with contextlib.suppress(ValueError, RecursionError):
                records = self._checked(json.loads(line))
        # Half of a surrogate pair in the text itself is not text.
        document = records[-1] if records else None
        if not isinstance(document, Document) or not _is_text(document):
            yield Reject(self.lines, reason, detail)
            return
        yield Reject(self.lines, "not_strict_json", f"outside the text: {detail}", kept=True)
        yield from records

    def _decoded(
        self,
        stream: HashedStream,
        packing: Packing | None,
        read: Callable[[str], Iterator[Document | Reject]],
    ) -> Iterator[Document | Reject]:
        """Read a file that is taken as a whole."""
        chunks: list[bytes] = []
        for chunk in chunks_of(stream, packing):
            if isinstance(chunk, DamageError):  # a part of the text is not a document
                yield Reject(1, chunk.reason, chunk.detail)
                return
            chunks.append(chunk)
        self.lines = 1
        try:
            text = decode(b"".join(chunks))
        except NotTextError as error:
            yield Reject(1, "invalid_utf8", str(error))
            return
        yield from read(text)

    def _text(self, content: str) -> Iterator[Document | Reject]:
        for number, text in enumerate(cut_text(_with_newlines(content)), start=1):
            self.lines = number
            yield from self._checked_text(text, self._keys.default_source)

    def _csv(self, content: str) -> Iterator[Document | Reject]:
        """Read a table with a header, whatever of `_DELIMITERS` stands between its fields."""
        header = content.lstrip().partition("\n")[0]
        csv.field_size_limit(max(len(content) + len(_END_OF_TABLE), csv.field_size_limit()))
        delimiter = max(_DELIMITERS, key=header.count)
        table = content.rstrip("\r\n")
        ended = io.StringIO(f"{table}\n{_END_OF_TABLE}" if table else "", newline="")
        rows = csv.reader(ended, delimiter=delimiter)
        names = [name.strip() for name in next(rows, []) if _END_OF_TABLE not in name]
        self._require_text([name for name in names if name])
        self.lines = 0
        try:
            for fields in rows:
                if fields and _END_OF_TABLE in fields[-1]:
                    if fields != [_END_OF_TABLE]:
                        detail = "its quote is never closed; what follows is lost"
                        yield Reject(self.lines + 1, "damaged", detail)
                    return
                if fields:
                    self.lines += 1
                    named = dict.fromkeys(names) | dict(zip(names, fields, strict=False))
                    yield from self._checked({name: own for name, own in named.items() if name})
        except csv.Error as error:
            yield Reject(self.lines + 1, "damaged", f"{error}; what follows is lost")

    def _require_text(self, names: Sequence[str]) -> None:
        """Raise NoTextColumn if no column of these names may hold the text."""
        if not any(_may_hold(name, key) for name in names for key in self._keys.text_keys):
            raise NoTextColumn(
                f"{self._file.path} has no column {_either(self._keys.text_keys)}, it has "
                f"{', '.join(names) or 'none'}; set --text-key, or move the file away"
            )

    @contextlib.contextmanager
    def _whole(self) -> Iterator[Path | BinaryIO]:
        """Open a seekable file for pyarrow: the input, or an object's bytes, fetched once."""
        path = self._file.path
        if isinstance(path, Path):
            yield path
            return
        with self._file.open() as raw, tempfile.TemporaryFile() as spooled:
            stream = HashedStream(raw, self._file.size)
            shutil.copyfileobj(stream, spooled, 1 << 20)
            self._sha256 = stream.hexdigest()
            spooled.seek(0)
            yield cast(BinaryIO, spooled)

    def _parquet(self, path: Path | BinaryIO) -> Iterator[Document | Reject]:
        with needs_extra(str(self._file.path), "parquet"):
            import pyarrow
            import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as table:
                names = table.schema_arrow.names
                keys = (*self._keys.text_keys, self._keys.source)
                columns = [name for name in names if any(_may_hold(name, key) for key in keys)]
                self._require_text(names)
                self._rows = rows = table.metadata.num_rows
                for batch in table.iter_batches(_PARQUET_ROWS, columns=columns):
                    yield from self._parquet_rows(batch)
                if self.lines < rows:
                    came = f"{self.lines:,} of {rows:,} rows came"
                    yield Reject(self.lines + 1, "damaged", f"{came}; the others are lost")
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the disk's; pyarrow's own for damaged pages have no number
            # pyarrow tells a file that was cut short from other damage in no stable way.
            detail = f"{str(error).splitlines()[0]}; what follows is lost"
            yield Reject(self.lines + 1, "damaged", detail)

    def _parquet_rows(self, batch: Any) -> Iterator[Document | Reject]:
        named = list(zip(batch.schema.names, batch.columns, strict=True))
        for number in range(batch.num_rows):
            self.lines += 1
            try:
                record = {name: column[number].as_py() for name, column in named}
            except UnicodeDecodeError as error:
                yield Reject(self.lines, "invalid_utf8", str(error))
                continue
            yield from self._checked(record)

    def _checked(self, record: Any) -> list[Document | Reject]:
        found = {key: _look_up(record, key) for key in self._keys.text_keys}
        found = {key: value for key, value in found.items() if value is not None}
        if not found:
            there = (
                f", which has {', '.join(record)}" if isinstance(record, dict) and record else ""
            )
            detail = f"no {_either(self._keys.text_keys)} in the record{there}"
            return [Reject(self.lines, "missing_text", detail)]
        full = (key for key, value in found.items() if value and isinstance(value, str))
        key = next(full, next(iter(found)))
        text = found[key]
        source = _look_up(record, self._keys.source)
        if not isinstance(text, str):
            detail = f'"{key}" is {type(text).__name__}, not a string'
            return [Reject(self.lines, "text_not_string", detail)]
        if source is not None and (not isinstance(source, str) or not source):
            detail = f'"{self._keys.source}" is not a non-empty string'
            return [Reject(self.lines, "bad_source", detail)]
        return self._checked_text(text, source or self._keys.default_source, key)

    def _checked_text(self, text: str, source: str, key: str = "") -> list[Document | Reject]:
        if not text:
            return [Reject(self.lines, "empty_text", "the text is empty")]
        document = Document(text, source, f"{self._file.name}:{self.lines}", key)
        return [*(Reject(self.lines, *oddity, kept=True) for oddity in _oddities(text)), document]


def cut_text(
    text: str, limit: int = TEXT_CHARACTERS, ends: Sequence[re.Pattern[str]] = _ENDS
) -> Iterator[str]:
    """Yield parts of a text, as long as possible, without the white space at which it is cut.

    What has no blank line is cut at the ends of lines, a longer line at the ends of sentences, a
    longer sentence at spaces, and what has none of these wherever the limit is.

    Args:
        text: the text.
        limit: characters of a part.
        ends: where to cut, the best places first.
    """
    if not ends:
        yield from (text[start : start + limit] for start in range(0, len(text), limit))
        return
    for part in _cut_at(ends[0], text, limit):
        yield from cut_text(part, limit, ends[1:]) if len(part) > limit else (part,)


def _cut_at(ends: re.Pattern[str], text: str, limit: int) -> Iterator[str]:
    start = 0  # of the part that grows
    before = (0, 0)  # the place for a cut that was found last
    for gap in [*(match.span() for match in ends.finditer(text)), (len(text), len(text))]:
        if gap[0] - start > limit and before[0] > start:
            yield text[start : before[0]]
            start = before[1]
        before = gap
    if start == 0 or start < len(text):
        yield text[start:]


def _with_newlines(text: str) -> str:
    """Return a text with the line ends of Windows and of the old Mac as newlines."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_documents(file: InputFile, keys: RecordKeys) -> Iterator[Document]:
    """Iterate over the usable documents of an input; rejects are skipped.

    Args:
        file: the input.
        keys: where its records hold text and source.
    """
    return (record for record in RecordReader(file, keys) if isinstance(record, Document))


def _look_up(record: Any, key: str) -> Any:
    """Return the value of a key: of that very name, else with a dot one object down."""
    if isinstance(record, list):  # a MAP of parquet comes as pairs
        pairs = (pair for pair in record if isinstance(pair, tuple) and len(pair) == 2)
        record = {name: value for name, value in pairs if isinstance(name, str)}
    if not isinstance(record, dict):
        return None
    value = record.get(key)
    dot = key.rfind(".")
    while value is None and dot > 0:
        if (inner := record.get(key[:dot])) is not None:
            value = _look_up(inner, key[dot + 1 :])
        dot = key.rfind(".", 0, dot)
    return value


def _either(keys: Sequence[str]) -> str:
    """Return keys as words: "a", "b" or "c"."""
    quoted = [f'"{key}"' for key in keys]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _utf8(lines: Iterator[bytes | DamageError]) -> Iterator[bytes | DamageError]:
    """Yield lines, as UTF-8 where the first begins with a mark of UTF-16 or UTF-32."""
    for first in lines:
        encoding = marked(first) if isinstance(first, bytes) else None
        if encoding in (None, "utf-8-sig"):
            yield first
        else:
            yield from _recoded([first, *lines], str(encoding))
        yield from lines


def _recoded(lines: list[bytes | DamageError], encoding: str) -> list[bytes | DamageError]:
    """Return the lines of a file that is not UTF-8 as UTF-8; as they are where that fails."""
    whole = [line for line in lines if isinstance(line, bytes)]
    damage = [line for line in lines if isinstance(line, DamageError)]
    try:
        text = b"\n".join(whole).decode(encoding)
    except UnicodeDecodeError:
        return lines
    return [*text.encode().split(b"\n"), *damage]


def _may_hold(column: str, key: str) -> bool:
    """Return whether the key's value may lie in the column."""
    return key == column or key.startswith(f"{column}.")


def _json_fault(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Return (reason, detail) of a line that is not JSON. Slow, and only for such lines."""
    try:
        line.decode()
    except UnicodeDecodeError as fault:
        return (
            "invalid_utf8",
            f"byte {fault.start} of the line is not valid UTF-8; {likely(line)}",
        )
    if b"\x00" in line:
        return "nul_byte", f"byte {line.index(0)} of the line is NUL"
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "lone_surrogate", f"half of a surrogate pair in an escape ({error.msg})"
    except (ValueError, RecursionError):
        pass
    return "bad_json", error.msg


def _is_text(document: Document) -> bool:
    try:
        f"{document.text}{document.source}".encode()
    except UnicodeEncodeError:
        return False
    return True


def _oddities(text: str) -> list[tuple[str, str]]:
    """Return (reason, detail) of everything unusual in a usable text."""
    if len(text) < LONG_BYTES // 4 and text.isascii() and "\x00" not in text:
        return []
    oddities = []
    if "\x00" in text:
        oddities.append(("contains_nul", "the text holds NUL; it is kept exactly"))
    if "\u2581" in text:
        oddities.append(
            ("contains_u2581", "the text holds U+2581, which the tokenizer turns into a space")
        )
    if len(text) >= LONG_BYTES // 4 and len(text.encode()) >= LONG_BYTES:
        oddities.append(("long_document", f"{len(text.encode()):,} bytes of text"))
    return oddities
