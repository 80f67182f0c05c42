"""Whole-file helpers: hashing, and writes that are either complete or absent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, BinaryIO

from data_pipeline.errors import DataError

TEMPORARY_SUFFIX = ".tmp"
_CHUNK_BYTES = 1 << 22
_CHECKSUM = "checksum"


def sha256_file(path: Path, start: int = 0, end: int | None = None) -> str:
    """SHA-256 of a file's bytes, or of those from `start` to before `end`, as hex.

    Raises:
        DataError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            stream.seek(start)
            left = sys.maxsize if end is None else end - start
            while chunk := stream.read(min(left, _CHUNK_BYTES)):
                digest.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def temporary_path(path: Path) -> Path:
    """A name beside `path` that no other process writes to, on this host or one that shares the directory."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}{TEMPORARY_SUFFIX}")


def sync(stream: BinaryIO) -> None:
    """Everything written so far is on the disk when this returns."""
    stream.flush()
    os.fsync(stream.fileno())


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file (already fsynced) its final name, and make the name itself durable."""
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """The names in a directory are on the disk when this returns."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a small file so that a reader sees the old content, the new content, or no file: never a part.

    Args:
        durable: the name too is on the disk when this returns; else it may be lost with the machine's power.

    Raises:
        DataError: the file cannot be written.
    """
    temporary = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as stream:
            stream.write(content)
            sync(stream)
        os.replace(temporary, path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the directory itself may be what is missing
            temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def utf8(text: str) -> bytes:
    """UTF-8, in which the bytes of a file name that is none (surrogates in Python) are JSON escapes."""
    return text.encode(errors="backslashreplace")


def to_json(value: Any) -> bytes:
    """Readable JSON whose bytes depend on the value only (insertion order of keys included)."""
    return utf8(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def to_checked_json(value: dict[str, Any]) -> bytes:
    """`to_json`, with the SHA-256 of everything else under the key `checksum`."""
    return to_json(value | {_CHECKSUM: _checksum(value)})


def read_checked_json(path: Path, remedy: str) -> dict[str, Any]:
    """What `to_checked_json` made.

    Args:
        remedy: what to do about a damaged file, as a clause.

    Raises:
        DataError: the file cannot be read, or is not what was written.
    """
    try:
        value = read_json(path)
    except DataError as error:
        raise DataError(str(error).replace("delete it and make it again", remedy)) from error
    stated = value.pop(_CHECKSUM, None)
    if stated != _checksum(value):
        raise DataError(f"{path} is damaged: its content does not have the checksum that it states; {remedy}")
    return value


def _checksum(value: dict[str, Any]) -> str:
    content = utf8(json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")))
    return hashlib.sha256(content).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        DataError: the file cannot be read or is not a JSON object.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise DataError(f"{path} is no regular file; delete it and make it again")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); delete it and make it again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold a JSON object; delete it and make it again")
    return value
