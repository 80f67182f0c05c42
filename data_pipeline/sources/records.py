"""Readers of documents from input files, and of the lines that are not documents.

A line that is not a usable record does not stop the reading: a `Reject` takes its place. Damage of
the file itself is a `Reject` too, with `lost` set.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
    split_lines,
)
from data_pipeline.sources.cutting import Cutter
from data_pipeline.sources.discovery import InputFile, RecordKeys
from data_pipeline.sources.encodings import as_utf8, decoded, likely
from data_pipeline.sources.formats import Format, format_of

# Bytes from which a document is worth a note: it may be a whole log file or a data dump.
LONG_BYTES = 10_000_000
_DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}
_END_OF_TABLE = "\x03end of the table\x03"
"""Row added behind a table: an unclosed quote swallows it and is noticed by that."""
_PARQUET_ROWS = 512
# Reasons that concern a file and not a line.
LOST = ("truncated", "damaged")
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """Document of a source.

    Attributes:
        id: `FILE:LINE` with the input's name, for messages.
        key: Key of the record that holds the text; "" for inputs without records.
    """

    text: str
    source: str
    id: str
    key: str = ""


@dataclass(frozen=True)
class Reject:
    """Line or row that is unusual.

    Attributes:
        line: Number of the line in the file, from 1.
        reason: One of the reasons in docs/data-format.md.
        detail: What exactly is wrong.
        kept: Whether the document is usable and follows; otherwise there is none.
    """

    line: int
    reason: str
    detail: str
    kept: bool = False

    @property
    def lost(self) -> bool:
        """Return whether the reject is an unreadable part of the file instead of a line."""
        return self.reason in LOST


class RecordReader:
    """Iterable over the `Document`s and `Reject`s of an input, in order. Blank lines are skipped.

    A file that cannot be read at all raises DataError: a failing disk is not a hostile line.

    Args:
        keys: Keys of text and source in a record.
    """

    def __init__(self, file: InputFile, keys: RecordKeys) -> None:
        self.lines = 0
        self._file = file
        self._keys = keys
        self._stream: HashedStream | None = None
        self._rows = 0  # only a parquet file knows its number
        self._done = False
        self._sha256: str | None = None

    def input_bytes(self) -> int:
        """Return the bytes read so far of the input as stored on disk."""
        if self._done:
            return self._file.size
        if self._rows:
            return self._file.size * self.lines // self._rows
        return self._stream.hashed if self._stream is not None else 0

    def sha256(self) -> str:
        """Return the SHA-256 of the input.

        After everything has been read, only a parquet file on disk is read once more for it.
        """
        if self._sha256 is None:
            self._sha256 = hash_of(self._file)
        return self._sha256

    def __iter__(self) -> Iterator[Document | Reject]:
        file_format = format_of(self._file.name) or Format("lines")
        with refusing(f"read {self._file.path}"):
            if file_format.kind == "parquet":
                with self._seekable() as whole:
                    yield from self._parquet(whole)
            else:
                with self._file.open() as raw:
                    self._stream = stream = HashedStream(raw, self._file.size)
                    chunks = chunks_of(stream, file_format.packing)
                    if file_format.kind == "lines":
                        yield from self._json_lines(split_lines(as_utf8(chunks)))
                    elif file_format.kind == "text":
                        yield from self._text(decoded(chunks))
                    else:
                        texts = decoded(chunks, errors="surrogateescape")
                        yield from self._table(texts, _DELIMITERS[file_format.kind])
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
                broken = True  # the next line may be the end of a broken one
                continue
            if first:
                line = line.removeprefix(_UTF8_MARK)
                first = False
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if b"\r" in line.strip():  # line ends of the old Mac
                    yield from self._json_lines(line.split(b"\r"), broken)
                    broken = False
                    continue
                if broken:
                    broken = False
                    continue
                self.lines += 1
                if line.strip():
                    yield from self._documents_of_bad_json(line, error)
                continue
            self.lines += 1
            broken = False
            yield from self._documents_of_record(record)

    def _documents_of_bad_json(
        self, line: bytes, error: orjson.JSONDecodeError
    ) -> Iterator[Document | Reject]:
        """Read a line that is not strict JSON: a document if only other fields are to blame."""
        reason, detail = _json_fault(line, error)
        records: list[Document | Reject] = []
        if reason in ("lone_surrogate", "bad_json"):
            with contextlib.suppress(ValueError, RecursionError):
                records = self._documents_of_record(json.loads(line))
        # Half of a surrogate pair in the text itself is not text.
        document = records[-1] if records else None
        if not isinstance(document, Document) or not _is_text(document.text + document.source):
            yield Reject(self.lines, reason, detail)
            return
        yield Reject(self.lines, "not_strict_json", f"outside the text: {detail}", kept=True)
        yield from records

    def _text(self, texts: Iterable[str | DamageError]) -> Iterator[Document | Reject]:
        cutter = Cutter()
        newlines = io.IncrementalNewlineDecoder(None, translate=True)
        for text in texts:
            if isinstance(text, DamageError):
                yield from self._text_documents(cutter.break_off())
                yield Reject(self.lines + 1, text.reason, text.detail)
                return
            yield from self._text_documents(cutter.feed(newlines.decode(text)))
        yield from self._text_documents(cutter.feed(newlines.decode("", final=True), last=True))

    def _text_documents(self, texts: Iterable[str]) -> Iterator[Document | Reject]:
        for text in texts:
            self.lines += 1
            yield from self._documents_of_text(text, self._keys.default_source)

    def _table(
        self, texts: Iterable[str | DamageError], delimiters: str
    ) -> Iterator[Document | Reject]:
        """Read a delimited table with a header row; the delimiter is detected."""
        lost: list[DamageError] = []
        lines = _table_lines(texts, lost)
        first = next((line for line in lines if line.strip()), "")
        # A document may be longer than csv's default of 128 KiB.
        csv.field_size_limit(sys.maxsize)
        rows = csv.reader(
            itertools.chain([first], lines), delimiter=max(delimiters, key=first.count)
        )
        names = [name.strip() for name in next(rows, []) if _END_OF_TABLE not in name]
        if names or not lost:
            self._require_text([name for name in names if name])
        try:
            for fields in rows:
                if fields and _END_OF_TABLE in fields[-1]:
                    if fields != [_END_OF_TABLE] and not lost:
                        detail = "its quote is never closed; what follows is lost"
                        lost.append(DamageError("damaged", detail))
                    break
                if fields:
                    self.lines += 1
                    yield from self._row(names, fields)
        except csv.Error as error:
            lost.append(DamageError("damaged", f"{error}; what follows is lost"))
        yield from (Reject(self.lines + 1, damage.reason, damage.detail) for damage in lost)

    def _row(self, names: Sequence[str], fields: Sequence[str]) -> list[Document | Reject]:
        row = "".join(fields)
        if not _is_text(row):
            guess = likely(row.encode(errors="surrogateescape"))
            return [Reject(self.lines, "invalid_utf8", f"the row is not valid UTF-8; {guess}")]
        record = {name: field for name, field in zip(names, fields, strict=False) if name}
        short = len(fields) < len(names) and all(
            _look_up(record, key) is None for key in self._keys.text_keys
        )
        if short or any(fields[len(names) :]):
            detail = f"the row has {len(fields):,} fields, the header {len(names):,}"
            return [Reject(self.lines, "bad_row", detail)]
        return self._documents_of_record(record)

    def _require_text(self, names: Sequence[str]) -> None:
        """Raise NoTextColumn if no column of these names may hold the text."""
        if not any(_may_hold(name, key) for name in names for key in self._keys.text_keys):
            raise NoTextColumn(
                f"{self._file.path} has no column {_either(self._keys.text_keys)}, it has "
                f"{', '.join(names) or 'none'}; set --text-key, or move the file away"
            )

    @contextlib.contextmanager
    def _seekable(self) -> Iterator[Path | BinaryIO]:
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
                paths = [path for field in table.schema_arrow for path in _paths(field, keys)]
                self._require_text(names)
                self._rows = rows = table.metadata.num_rows
                for batch in table.iter_batches(_PARQUET_ROWS, columns=paths):
                    yield from self._parquet_rows(batch)
                if self.lines < rows:
                    rows_read = f"{self.lines:,} of {rows:,} rows came"
                    yield Reject(self.lines + 1, "damaged", f"{rows_read}; the others are lost")
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # by the disk; pyarrow's errors for damaged pages have no errno
            # pyarrow has no stable way to tell a truncated file from other damage.
            detail = f"{str(error).splitlines()[0]}; what follows is lost"
            yield Reject(self.lines + 1, "damaged", detail)

    def _parquet_rows(self, batch: Any) -> Iterator[Document | Reject]:
        columns = list(zip(batch.schema.names, batch.columns, strict=True))
        for number in range(batch.num_rows):
            self.lines += 1
            try:
                record = {name: column[number].as_py() for name, column in columns}
            except UnicodeDecodeError as error:
                yield Reject(self.lines, "invalid_utf8", str(error))
                continue
            except (ValueError, OverflowError) as error:
                yield Reject(self.lines, "bad_row", f"a value that Python does not have: {error}")
                continue
            yield from self._documents_of_record(record)

    def _documents_of_record(self, record: Any) -> list[Document | Reject]:
        texts = {key: _look_up(record, key) for key in self._keys.text_keys}
        texts = {key: value for key, value in texts.items() if value is not None}
        if not texts:
            other_keys = (
                f", which has {', '.join(record)}" if isinstance(record, dict) and record else ""
            )
            detail = f"no {_either(self._keys.text_keys)} in the record{other_keys}"
            return [Reject(self.lines, "missing_text", detail)]
        keys_with_text = (key for key, value in texts.items() if value and isinstance(value, str))
        key = next(keys_with_text, next(iter(texts)))
        text = texts[key]
        source = _look_up(record, self._keys.source)
        if not isinstance(text, str):
            detail = f'"{key}" is {type(text).__name__}, not a string'
            return [Reject(self.lines, "text_not_string", detail)]
        if source is not None and (not isinstance(source, str) or not source):
            detail = f'"{self._keys.source}" is not a non-empty string'
            return [Reject(self.lines, "bad_source", detail)]
        return self._documents_of_text(text, source or self._keys.default_source, key)

    def _documents_of_text(self, text: str, source: str, key: str = "") -> list[Document | Reject]:
        if not text:
            return [Reject(self.lines, "empty_text", "the text is empty")]
        document = Document(text, source, f"{self._file.name}:{self.lines}", key)
        return [*(Reject(self.lines, *oddity, kept=True) for oddity in _oddities(text)), document]


def read_documents(file: InputFile, keys: RecordKeys) -> Iterator[Document]:
    """Iterate over the usable documents of an input; rejects are skipped."""
    return (record for record in RecordReader(file, keys) if isinstance(record, Document))


def _look_up(record: Any, key: str) -> Any:
    """Return the value of a key: under that very name, else one object down at a dot."""
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
    """Join keys as words: "a", "b" or "c"."""
    quoted = [f'"{key}"' for key in keys]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _table_lines(texts: Iterable[str | DamageError], lost: list[DamageError]) -> Iterator[str]:
    """Yield the lines of a table with their ends, then _END_OF_TABLE; add damage to `lost`."""
    rest = ""
    for text in texts:
        if isinstance(text, DamageError):
            lost.append(text)
            rest = rest if rest.endswith("\n") else ""
            break
        lines = [*io.StringIO(rest + text, newline="")]
        rest = lines.pop() if lines else ""
        yield from lines
    yield rest
    yield _END_OF_TABLE


def _paths(field: Any, keys: Sequence[str], above: str = "") -> Iterator[str]:
    """Yield the paths of a parquet field that may hold values of the keys.

    Args:
        field: Field of pyarrow's schema.
        keys: Keys relative to the struct that contains the field.
        above: Path of that struct, with a dot behind.
    """
    import pyarrow

    inner_keys = [key for key in keys if _may_hold(field.name, key)]
    path = f"{above}{field.name}"
    if pyarrow.types.is_struct(field.type) and field.name not in inner_keys:
        for inner in field.type:
            yield from _paths(inner, [key[len(field.name) + 1 :] for key in inner_keys], f"{path}.")
    elif inner_keys:
        yield path


def _may_hold(column: str, key: str) -> bool:
    """Return whether the key's value may lie in the column."""
    return key == column or key.startswith(f"{column}.")


def _json_fault(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Return (reason, detail) of a line that is not JSON; slow, so only for such lines."""
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


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _oddities(text: str) -> list[tuple[str, str]]:
    """Return (reason, detail) of everything unusual in a usable text."""
    # A character has at most four bytes: most texts need no encoding to be known as short.
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
