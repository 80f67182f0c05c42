"""Input text: files of documents in, `Document(text, source, id)` out.

Formats, told by the ending of the file name: `.jsonl`, `.jsonl.zst`, `.jsonl.gz` (one JSON object per line)
and `.txt` (the whole file is one document). The default keys are SlimPajama's: `{"text": ..., "meta":
{"redpajama_set_name": ...}}`.
"""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from data_pipeline.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".txt")
DEFAULT_SOURCE = "default"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One document. `id` is `FILE:LINE` with the input's name, for messages and look-ups."""

    text: str
    source: str
    id: str


@dataclass(frozen=True)
class RecordKeys:
    """Where the text and the name of its source are in a JSON record; a dot goes one object down.

    A record without the source key belongs to the source "default".
    """

    text: str = "text"
    source: str = "meta.redpajama_set_name"


@dataclass(frozen=True)
class InputFile:
    """One input. `name` is its path below the inputs' common directory, wherever that lies."""

    path: Path
    name: str
    size: int


def find_inputs(inputs: list[Path]) -> list[InputFile]:
    """Files among `inputs` and below the directories among them, sorted by name.

    Raises:
        DataError: an input is missing, of an unknown format or given twice, or there is none at all.
    """
    found: list[Path] = []
    for entry in inputs:
        if entry.is_dir():
            found += [path for path in entry.rglob("*") if path.is_file() and path.name.endswith(SUFFIXES)]
        elif not entry.exists():
            raise DataError(f"input {entry} does not exist; give a file or a directory of files")
        elif not entry.name.endswith(SUFFIXES):
            raise DataError(f"input {entry} has an unknown ending; known are {', '.join(SUFFIXES)}")
        else:
            found.append(entry)
    if not found:
        names = ", ".join(str(entry) for entry in inputs)
        raise DataError(f"there is no {', '.join(SUFFIXES)} file in {names}")
    # abspath, not resolve: the hub's cache is symlinks to files whose own names say nothing.
    absolute = sorted(Path(os.path.abspath(path)) for path in found)
    for path, following in itertools.pairwise(absolute):
        if path == following:
            raise DataError(f"input {path} is given twice; name each file or directory once")
    roots = [os.path.abspath(entry if entry.is_dir() else entry.parent) for entry in inputs]
    root = os.path.commonpath(roots)
    files = [InputFile(path, path.relative_to(root).as_posix(), path.stat().st_size) for path in absolute]
    return sorted(files, key=lambda file: file.name)


def read_documents(file: InputFile, keys: RecordKeys) -> Iterator[Document]:
    """Documents of one file, in order. Blank lines are passed over; a document with empty text is yielded.

    Raises:
        DataError: the file is damaged or cut short, or a line is not a usable record (names FILE:LINE).
    """
    if file.name.endswith(".txt"):
        try:
            text = file.path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path}: byte {error.start} is not valid UTF-8; convert the file"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read {file.path}: {error.strerror or error}") from error
        yield Document(text, DEFAULT_SOURCE, f"{file.name}:1")
        return
    for number, line in enumerate(_lines(file.path), start=1):
        if not line.strip():
            continue
        try:
            text, source = parse_record(line, keys)
        except ValueError as error:
            raise DataError(f"{file.path}:{number}: {error}; mend or remove the line") from error
        yield Document(text, source, f"{file.name}:{number}")


def parse_record(line: bytes, keys: RecordKeys) -> tuple[str, str]:
    """(text, source) of one JSON line.

    Raises:
        ValueError: with the reason, if the line is not a usable record.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    text = _look_up(record, keys.text)
    if text is None:
        raise ValueError(f'no "{keys.text}" in the record')
    if not isinstance(text, str):
        raise ValueError(f'"{keys.text}" is {type(text).__name__}, not a string')
    source = _look_up(record, keys.source)
    if source is None:
        return text, DEFAULT_SOURCE
    if not isinstance(source, str) or not source:
        raise ValueError(f'"{keys.source}" is not a non-empty string')
    return text, source


def _look_up(record: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(record, dict):
            return None
        record = record.get(part)
    return record


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a plain, zstd or gzip file as bytes, memory bounded by the longest line."""
    try:
        if path.name.endswith(".zst"):
            yield from _split_lines(_zstd_chunks(path))
        elif path.name.endswith(".gz"):
            # gzip itself reads all members and raises EOFError on a file that is cut short.
            with gzip.open(path, "rb") as stream:
                yield from stream
        else:
            with open(path, "rb") as stream:
                yield from stream
    except EOFError as error:
        raise DataError(f"{path} is cut short; fetch it again") from error
    except (zstandard.ZstdError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Decompressed bytes of every frame.

    zstandard's own readers stop after the first frame or end silently in a cut one, so frames are followed
    here.

    Raises:
        EOFError: the last frame is not complete.
    """
    with open(path, "rb") as stream:
        decompressor = None
        while chunk := stream.read(_READ_BYTES):
            while chunk:
                if decompressor is None:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
                yield decompressor.decompress(chunk)
                chunk = decompressor.unused_data if decompressor.eof else b""
                if decompressor.eof:
                    decompressor = None
        if decompressor is not None:
            raise EOFError


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        head, newline, tail = chunk.rpartition(b"\n")
        if not newline:
            rest.append(chunk)
            continue
        yield from b"".join([*rest, head]).split(b"\n")
        rest = [tail]
    last = b"".join(rest)
    if last:
        yield last
