"""Readers of documents from input files, and of the lines that are not documents.

A line that is not a usable record does not stop the reading: a `Reject` takes its place. Damage of
the file itself is a `Reject` too, with `lost` set.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.io.files import refusing
from data_pipeline.sources import data_sets, hub
from data_pipeline.sources.containers import (
    DamageError,
    HashedStream,
    chunks_of,
    hash_of,
    split_lines,
)
from data_pipeline.sources.cutting import Cutter
from data_pipeline.sources.data_sets import DataShard
from data_pipeline.sources.discovery import InputFile, RecordKeys, may_hold, shortened_names
from data_pipeline.sources.encodings import as_utf8, decoded, likely
from data_pipeline.sources.formats import JSON_AS_A_WHOLE, Format, format_of, is_whole_json

# Bytes from which a document is worth a note: it may be a whole log file or a data dump.
LONG_BYTES = 10_000_000
_PARQUET_ROWS = 512
# Lines of a file whose encoding is guessed, at some milliseconds each.
_GUESSES = 100
# Reasons that concern a file and not a line.
LOST = ("truncated", "damaged")
_UTF8_MARK = b"\xef\xbb\xbf"
# Errors of a data set's reader about its bytes, and not about the network or the disk.
_DAMAGED = (
    ValueError,  # also pyarrow's and pandas' own
    Warning,  # of pandas, an error by `data_sets`
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zlib.error,
    zstandard.ZstdError,
)


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
        self._bad = 0  # lines that are not strict JSON
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
        path = self._file.path
        if isinstance(path, DataShard):
            with data_sets.refusing(str(path)):
                yield from self._data_set(path)
        else:
            with refusing(f"read {path}"):
                yield from self._local(path)
        self._done = True

    def _local(self, path: Path) -> Iterator[Document | Reject]:
        file_format = format_of(self._file.name) or Format("lines")
        if file_format.kind == "parquet":
            yield from self._parquet(path)
            return
        with self._file.open() as raw:
            self._stream = stream = HashedStream(raw, self._file.size)
            chunks = chunks_of(stream, file_format.packing)
            if file_format.kind == "lines":
                yield from self._json_lines(split_lines(as_utf8(chunks)))
            else:
                yield from self._text(decoded(chunks))
            self._sha256 = stream.hexdigest()

    def _json_lines(self, lines: Iterable[bytes | DamageError]) -> Iterator[Document | Reject]:
        lines = iter(lines)
        beginning = [*itertools.islice(lines, 2)]
        if beginning and isinstance(beginning[0], bytes):
            beginning[0] = beginning[0].removeprefix(_UTF8_MARK)
            second = beginning[1] if len(beginning) > 1 else b""
            if isinstance(second, bytes) and is_whole_json(beginning[0], second):
                yield Reject(1, "damaged", f"the file is {JSON_AS_A_WHOLE}")
                return
        yield from self._json_records(itertools.chain(beginning, lines))

    def _json_records(
        self, lines: Iterable[bytes | DamageError], broken: bool = False
    ) -> Iterator[Document | Reject]:
        """Read lines that are a record each.

        Args:
            broken: Whether bytes before the lines are lost.
        """
        for line in lines:
            if isinstance(line, DamageError):
                yield Reject(self.lines + 1, line.reason, line.detail)
                broken = True  # the next line may be the end of a broken one
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                parts = line.split(b"\r")  # line ends of the old Mac, unless it is a bad line
                if sum(map(_is_json, parts)) > len(parts) / 2:
                    yield from self._json_records(parts, broken)
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
        self._bad += 1
        reason, detail = _json_fault(line, error, guess=self._bad <= _GUESSES)
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

    def _parquet(self, path: Path) -> Iterator[Document | Reject]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as table:
                keys = [*self._keys.text_keys, self._keys.source]
                paths = [path for field in table.schema_arrow for path in _paths(field, keys)]
                self._keys.require_text(table.schema_arrow.names, path)
                self._rows = rows = table.metadata.num_rows
                for batch in table.iter_batches(_PARQUET_ROWS, columns=paths):
                    for record in self._records(batch):
                        yield from self._documents(record)
                if self.lines < rows:
                    rows_read = f"{self.lines:,} of {rows:,} rows came"
                    yield Reject(self.lines + 1, "damaged", f"{rows_read}; the others are lost")
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # by the disk; pyarrow's errors for damaged pages have no errno
            # pyarrow has no stable way to tell a truncated file from other damage.
            detail = f"{str(error).splitlines()[0]}; what follows is lost"
            yield Reject(self.lines + 1, "damaged", detail)

    def _data_set(self, shard: DataShard) -> Iterator[Document | Reject]:
        """Read a data set's shard, whose hash is that of its rows."""
        digest = hashlib.sha256()
        of_lines = shard.address.startswith("text:")
        try:
            for batch in shard.batches():
                for record in self._records(batch):
                    digest.update(repr(record).encode())
                    if not (of_lines and _is_blank(record)):
                        yield from self._documents(record)
        except _DAMAGED as error:
            if isinstance(error, DataError):
                raise
            detail = f"{hub.one_line(error)}; what follows is lost"
            yield Reject(self.lines + 1, "damaged", detail)
        self._sha256 = digest.hexdigest()

    def _records(self, batch: Any) -> Iterator[dict[str, Any] | Reject]:
        """Yield the rows of a record batch of pyarrow; a Reject for one that cannot be read.

        Args:
            batch: Record batch, or one row as it is.
        """
        if isinstance(batch, dict):
            self.lines += 1
            if all(_is_text(text) for text in batch.values() if isinstance(text, str)):
                yield batch
            else:
                yield Reject(self.lines, "lone_surrogate", "half of a surrogate pair")
            return
        columns = list(zip(batch.schema.names, batch.columns, strict=True))
        for number in range(batch.num_rows):
            self.lines += 1
            try:
                yield {name: column[number].as_py() for name, column in columns}
            except UnicodeDecodeError as error:
                yield Reject(self.lines, "invalid_utf8", str(error))
            except (ValueError, OverflowError) as error:
                detail = f"a value that Python does not have: {error}"
                yield Reject(self.lines, "bad_row", detail)

    def _documents(self, record: dict[str, Any] | Reject) -> list[Document | Reject]:
        return [record] if isinstance(record, Reject) else self._documents_of_record(record)

    def _documents_of_record(self, record: Any) -> list[Document | Reject]:
        texts = {key: _look_up(record, key) for key in self._keys.text_keys}
        texts = {key: value for key, value in texts.items() if value is not None}
        if not texts:
            other_keys = (
                f", which has {shortened_names([*record])}"
                if isinstance(record, dict) and record
                else ""
            )
            detail = f"no {self._keys.either_text_key()} in the record{other_keys}"
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


def content_hash(file: InputFile, keys: RecordKeys) -> str:
    """Return the SHA-256 of a file's bytes, or of the rows of a data set's shard."""
    if not isinstance(file.path, DataShard):
        return hash_of(file)
    reader = RecordReader(file, keys)
    for _ in reader:
        pass
    return reader.sha256()


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


def _paths(field: Any, keys: list[str], above: str = "") -> Iterator[str]:
    """Yield the paths of a parquet field that may hold values of the keys.

    Args:
        field: Field of pyarrow's schema.
        keys: Keys relative to the struct that contains the field.
        above: Path of that struct, with a dot behind.
    """
    import pyarrow

    inner_keys = [key for key in keys if may_hold(field.name, key)]
    path = f"{above}{field.name}"
    if pyarrow.types.is_struct(field.type) and field.name not in inner_keys:
        for inner in field.type:
            yield from _paths(inner, [key[len(field.name) + 1 :] for key in inner_keys], f"{path}.")
    elif inner_keys:
        yield path


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _json_fault(line: bytes, error: orjson.JSONDecodeError, guess: bool) -> tuple[str, str]:
    """Return (reason, detail) of a line that is not JSON; slow, so only for such lines.

    Args:
        guess: Whether to name the likely encoding of a line that is not UTF-8, which is slower.
    """
    try:
        line.decode()
    except UnicodeDecodeError as fault:
        encoding = likely(line, fault.start) if guess else "see the lines before"
        return (
            "invalid_utf8",
            f"byte {fault.start} of the line is not valid UTF-8; {encoding}",
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


def _is_blank(record: dict[str, Any] | Reject) -> bool:
    return isinstance(record, dict) and not any(str(text).strip() for text in record.values())


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
