"""Readers of documents from input files, and of the lines that are none.

The ending of the file name, in any case, tells the format (docs/data.md). A line that is no usable record
does not stop the reading: a `Reject` takes its place. Damage of the file itself is a `Reject` too, with
`lost` set.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from data_pipeline.errors import DataError, needs_extra
from data_pipeline.io.files import refusing
from data_pipeline.sources.containers import DamageError, HashedStream, hash_of, lines_of, shortened
from data_pipeline.sources.discovery import Piece, RecordKeys

# From here on a document is worth a note: it may be a whole log file or a data dump.
LONG_BYTES = 10_000_000
# A .txt of more characters, such as a novel, is cut at blank lines into documents of at most so many.
TEXT_CHARACTERS = 1 << 14
_BLANK_LINES = re.compile(r"\r?\n(?:[ \t\r]*\n)+")
_PARQUET_ROWS = 512
# Reasons that concern a file and not a line.
LOST = ("truncated", "damaged")
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """Document of a source. `id` is `FILE:LINE` with the input's name, for messages and look-ups."""

    text: str
    source: str
    id: str


@dataclass(frozen=True)
class Reject:
    """Line or row that is unusual. `line` counts from 1 within the piece that is read.

    kept: the document is unusual but usable and follows; otherwise there is none.
    reason: one of those in docs/data-format.md.
    """

    line: int
    reason: str
    detail: str
    kept: bool = False

    @property
    def lost(self) -> bool:
        """Return whether this is no line, but an unreadable part of the file with any number of lines."""
        return self.reason in LOST


class RecordReader:
    """Iterable over one piece: `Document`s and `Reject`s, in order. Blank lines are skipped.

    A file that cannot be read at all is a DataError: a failing disk is not a hostile line.
    """

    def __init__(self, piece: Piece, keys: RecordKeys) -> None:
        self.lines = 0
        self._piece = piece
        self._name = piece.file.name
        self._keys = keys
        self._text_path, self._source_path = keys.text.split("."), keys.source.split(".")
        self._position: Callable[[], int] = lambda: piece.start
        self._sha256: str | None = None

    def input_bytes(self) -> int:
        """Return the bytes of the piece, as it lies on disk, that have been read."""
        return max(0, min(self._position(), self._piece.end) - self._piece.start)

    def sha256(self) -> str:
        """Return the SHA-256 of the piece's bytes.

        After everything has been read this costs no second reading, except of a parquet file on disk.
        """
        if self._sha256 is None:
            self._sha256 = hash_of(self._piece)
        return self._sha256

    def __iter__(self) -> Iterator[Document | Reject]:
        path = self._piece.file.path
        name = path.name.lower()
        with refusing(f"read {path}"):
            if name.endswith(".parquet"):
                with self._whole() as file:
                    yield from self._parquet(file)
            else:
                with self._piece.file.open() as raw:
                    stream = HashedStream(raw, self._piece)
                    self._position = lambda: self._piece.end if raw.closed else stream.tell()
                    yield from (
                        self._text(stream)
                        if name.endswith((".txt", ".md"))
                        else self._json_lines(stream)
                    )
                    self._sha256 = stream.hexdigest()
            self._piece.file.check_unchanged()
        self._position = lambda: self._piece.end

    def _json_lines(self, stream: HashedStream) -> Iterator[Document | Reject]:
        first = self._piece.start == 0
        broken = False  # what comes after a damage may begin in the middle of a line
        for line in lines_of(stream, self._piece):
            if isinstance(line, DamageError):
                yield Reject(self.lines + 1, line.reason, line.detail)
                broken = True
                continue
            if first:
                line, first = line.removeprefix(_UTF8_MARK), False
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
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
        """Read a line that is no strict JSON: a document if only other fields than the text are to blame."""
        reason, detail = _json_fault(line, error)
        records: list[Document | Reject] = []
        if reason in ("lone_surrogate", "bad_json"):
            with contextlib.suppress(ValueError, RecursionError):
                records = self._checked(json.loads(line))
        # Half of a surrogate pair in the text itself is no text.
        if (
            not records
            or not isinstance(document := records[-1], Document)
            or not _is_text(document)
        ):
            yield Reject(self.lines, reason, detail)
            return
        yield Reject(self.lines, "not_strict_json", f"outside the text: {detail}", kept=True)
        yield from records

    def _text(self, stream: HashedStream) -> Iterator[Document | Reject]:
        content = (stream.read() or b"").removeprefix(_UTF8_MARK)
        if stream.missing:  # a part of the text is no document
            yield Reject(1, "truncated", shortened(stream.tell(), self._piece))
            return
        self.lines = 1
        try:
            for number, text in enumerate(cut_at_blank_lines(content.decode()), start=1):
                self.lines = number
                yield from self._checked_text(text, self._keys.default_source)
        except UnicodeDecodeError as error:
            yield Reject(1, "invalid_utf8", f"byte {error.start} of the file is not valid UTF-8")

    @contextlib.contextmanager
    def _whole(self) -> Iterator[Path | BinaryIO]:
        """Open a seekable file for pyarrow: the input, or an object's bytes, fetched and hashed once."""
        path = self._piece.file.path
        if isinstance(path, Path):
            yield path
            return
        with self._piece.file.open() as raw, tempfile.TemporaryFile() as spooled:
            stream = HashedStream(raw, self._piece)
            shutil.copyfileobj(stream, spooled, 1 << 20)
            self._sha256 = stream.hexdigest()
            spooled.seek(0)
            yield cast(BinaryIO, spooled)

    def _parquet(self, path: Path | BinaryIO) -> Iterator[Document | Reject]:
        with needs_extra(str(self._piece.file.path), "parquet"):
            import pyarrow
            import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
                roots = {key: key.split(".")[0] for key in (self._keys.text, self._keys.source)}
                names = file.schema_arrow.names
                if roots[self._keys.text] not in names:
                    raise DataError(
                        f'{self._piece.file.path} has no column "{self._keys.text}", it has '
                        f"{', '.join(names)}; set --text-key"
                    )
                total = max(1, file.metadata.num_rows)
                self._position = lambda: self._piece.file.size * self.lines // total
                columns = [name for name in names if name in roots.values()]
                for batch in file.iter_batches(_PARQUET_ROWS, columns=columns):
                    yield from self._parquet_rows(batch)
                if self.lines < file.metadata.num_rows:
                    rows = f"{self.lines:,} of {file.metadata.num_rows:,} rows came"
                    yield Reject(self.lines + 1, "damaged", f"{rows}; the others are lost")
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the disk's; pyarrow's own for damaged pages have no number
            # pyarrow tells a file that was cut short from one with other damage in no stable way.
            yield Reject(
                self.lines + 1, "damaged", f"{str(error).splitlines()[0]}; what follows is lost"
            )

    def _parquet_rows(self, batch: Any) -> Iterator[Document | Reject]:
        for number in range(batch.num_rows):
            self.lines += 1
            try:
                record = {name: batch.column(name)[number].as_py() for name in batch.schema.names}
            except UnicodeDecodeError as error:
                yield Reject(self.lines, "invalid_utf8", str(error))
                continue
            yield from self._checked(record)

    def _checked(self, record: Any) -> list[Document | Reject]:
        text, source = _look_up(record, self._text_path), _look_up(record, self._source_path)
        if text is None:
            return [Reject(self.lines, "missing_text", f'no "{self._keys.text}" in the record')]
        if not isinstance(text, str):
            kind = type(text).__name__
            return [
                Reject(
                    self.lines, "text_not_string", f'"{self._keys.text}" is {kind}, not a string'
                )
            ]
        if source is not None and (not isinstance(source, str) or not source):
            return [
                Reject(self.lines, "bad_source", f'"{self._keys.source}" is not a non-empty string')
            ]
        return self._checked_text(text, source or self._keys.default_source)

    def _checked_text(self, text: str, source: str) -> list[Document | Reject]:
        if not text:
            return [Reject(self.lines, "empty_text", "the text is empty")]
        document = Document(text, source, f"{self._name}:{self.lines}")
        if not (oddities := _oddities(text)):
            return [document]
        return [*(Reject(self.lines, *oddity, kept=True) for oddity in oddities), document]


def cut_at_blank_lines(text: str, limit: int = TEXT_CHARACTERS) -> Iterator[str]:
    """Yield parts of at most `limit` characters, as long as can be, without the blank lines between them.

    Lines that no blank line parts stay together, however many characters they have.
    """
    start, before = 0, (0, 0)  # of the part that grows, and the blank lines that were found last
    for gap in [*(match.span() for match in _BLANK_LINES.finditer(text)), (len(text), len(text))]:
        if gap[0] - start > limit and before[0] > start:
            yield text[start : before[0]]
            start = before[1]
        before = gap
    if start == 0 or start < len(text):
        yield text[start:]


def read_documents(piece: Piece, keys: RecordKeys) -> Iterator[Document]:
    """Iterate over the usable documents of a piece; rejects are skipped."""
    return (record for record in RecordReader(piece, keys) if isinstance(record, Document))


def _look_up(record: Any, path: list[str]) -> Any:
    for part in path:
        if not isinstance(record, dict):
            return None
        record = record.get(part)
    return record


def _json_fault(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Return (reason, detail) of a line that is not JSON. Slow, and only for such lines."""
    try:
        line.decode()
    except UnicodeDecodeError as fault:
        return "invalid_utf8", f"byte {fault.start} of the line is not valid UTF-8"
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
