"""Whole-file helpers: regular files, hashing, and writes that are either complete or absent.

`open_regular`, `read_regular`, `hash_file`, `replace_file` and what writes text or JSON with it
raise OSError, so that callers can word their own message; the other functions raise DataError.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from data_pipeline.errors import DataError
from data_pipeline.io.forms import T, in_form, parse_json

REMAKE = "delete it and make it again"
TEMPORARY_SUFFIX = ".tmp"
NOT_REGULAR = "it is not a regular file"
ABANDONED_AFTER = 600.0
"""Seconds without a write after which a process of another host counts as gone."""
MOST_BYTES = 1 << 30
"""Most bytes of a file that is read whole, such as a configuration, an index or a tokenizer."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of what Git leaves in place of a large file."""
_CHUNK_BYTES = 1 << 22
_CHECKSUM = "checksum"


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn an OSError raised inside into the DataError `cannot WHAT: why`.

    Raises:
        DataError: an OSError was raised.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot {what}: {error.strerror or error}") from error


def refuse_unwritable(out: Path, directory: Path | None = None) -> None:
    """Refuse an output path that cannot be written, before any work is done for it.

    Args:
        out: Value of the option --out.
        directory: Directory of the files, created with its parents; None means `out`.

    Raises:
        DataError: If the path is a file, lies inside one, or takes no new files.
    """
    nearest_existing = (directory or out).absolute()
    while not os.path.lexists(nearest_existing):
        nearest_existing = nearest_existing.parent
    if not os.path.isdir(nearest_existing):
        reason = f"{nearest_existing} is not a directory"
    elif not os.access(nearest_existing, os.W_OK | os.X_OK):
        reason = (
            f"{nearest_existing} takes no new files (its permissions, or it is mounted read-only)"
        )
    else:
        return
    raise DataError(f"--out {out} cannot be written: {reason}; name another directory")


def open_regular(path: Path, most_bytes: int | None = None, follow_link: bool = True) -> BinaryIO:
    """Open a regular file for reading; neither wait for a pipe nor read a device.

    A pointer of Git LFS, left in place of a large file, is refused too. Everything that a user or
    a file names is opened by this function.

    Args:
        most_bytes: Largest size; None: any.
        follow_link: Whether a symbolic link is followed; otherwise the link itself is refused.

    Raises:
        OSError: The path cannot be opened, or is not a regular file of that size.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow_link else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ELOOP):  # a socket; a link that is not followed
            raise
        raise OSError(error.errno, NOT_REGULAR, str(path)) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    stream = os.fdopen(descriptor, "rb")
    try:
        if most_bytes is not None and status.st_size > most_bytes:
            raise _too_large(path, status.st_size, most_bytes)
        if stream.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
            problem = "it is a pointer of Git LFS; fetch the file itself with `git lfs pull`"
            raise OSError(errno.EINVAL, problem, str(path))
    except OSError:
        stream.close()
        raise
    return stream


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file whole.

    Raises:
        OSError: As `open_regular`.
    """
    content = bytearray()
    with open_regular(path, most_bytes) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            content += chunk
            if len(content) > most_bytes:  # some files of the system state no size
                raise _too_large(path, len(content), most_bytes)
    return bytes(content)


def _too_large(path: Path, size: int, most_bytes: int) -> OSError:
    problem = f"it has {size:,} bytes, and such a file has {most_bytes:,} at most"
    return OSError(errno.EFBIG, problem, str(path))


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hex; DataError if the file cannot be read."""
    with refusing(f"read {path}"):
        return hash_file(path)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hex."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def temporary_path(path: Path) -> Path:
    """Return a name beside `path` that no other process of any host uses."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}{TEMPORARY_SUFFIX}")


def is_abandoned(temporary: Path) -> bool:
    """Return whether the process that was writing a temporary file is gone.

    On this host, the process has ended; on another host, it has written nothing for ABANDONED_AFTER
    seconds.
    """
    host, _, pid = temporary.name.removesuffix(TEMPORARY_SUFFIX).rpartition("-")
    if host.endswith(f".{socket.gethostname()}") and pid.isdigit():
        return not Path(f"/proc/{pid}").exists()
    try:
        return time.time() - temporary.stat().st_mtime > ABANDONED_AFTER
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError raised inside: a failed write to an open file names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(stream: BinaryIO) -> None:
    """Flush a file and wait until everything written so far is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk, where its file system can be asked."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        # Some file systems of networks and virtual machines keep names without being asked.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)


class Draft:
    """File written under a temporary name beside `path` until `publish` renames it.

    Used as a context manager, the file is published at the end, or discarded after an error.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.temporary = temporary_path(path)
        # Closed by publish or discard.
        self.stream: BinaryIO = open(self.temporary, "wb")  # noqa: SIM115

    def publish(self) -> None:
        """Close the file and move it to `path`, replacing any file there.

        The rename survives a power failure only once the directory is synced.
        """
        # Content first: a crash after the rename must not leave an empty file under the final name.
        sync(self.stream)
        self.stream.close()
        os.replace(self.temporary, self.path)

    def discard(self) -> None:
        """Remove the temporary file unless it was published."""
        # On a full disk closing tries once more to write what is buffered.
        with contextlib.suppress(OSError):
            self.stream.close()
        # The directory itself may have been removed.
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> BinaryIO:
        return self.stream

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a small file, unless it has this content, as `replace_file`; DataError on failure."""
    with refusing(f"write {path}"):
        if not path.is_file() or path.read_bytes() != content:
            replace_file(path, content, durable)


def replace_file(path: Path, content: bytes, durable: bool = True) -> None:
    """Replace a small file: a reader sees the old content, the new, or no file, never a part.

    An OSError names `path`, and no temporary file is left.

    Args:
        durable: Whether to wait until the name is on the disk too; otherwise a power failure may
            lose it.
    """
    with naming(path), Draft(path) as stream:
        stream.write(content)
    if durable:
        sync_directory(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text so that a kill leaves either the old content or all of the new one.

    Raises:
        OSError: the write failed; the error names `path`, and the old content stays.
    """
    replace_file(path, text.encode(), durable=False)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically, with null for numbers that JSON does not have.

    Args:
        content: Content that JSON can hold; NaN and infinity are allowed.
    """
    write_text_atomically(path, json.dumps(strict_json(content), indent=1) + "\n")


def strict_json(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8; surrogates, which file names may have, become JSON escapes."""
    return text.encode(errors="backslashreplace")


def to_json(value: Any) -> bytes:
    """Return readable JSON whose bytes depend on the value only, order of keys included."""
    return utf8(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def as_json(record: Any) -> dict[str, Any]:
    """Convert a dataclass to the value that parsing its JSON would return."""
    value: dict[str, Any] = json.loads(json.dumps(asdict(record)))
    return value


def to_checked_json(value: dict[str, Any]) -> bytes:
    """Return `to_json` of the value, with its SHA-256 under the key `checksum`."""
    return to_json(value | {_CHECKSUM: _checksum(value)})


def read_checked_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a file that `to_checked_json` made.

    Args:
        remedy: Clause that says what to do about damage.

    Raises:
        DataError: If the file is damaged; the message ends in `remedy`.
    """
    value = read_json(path, remedy)
    stated = value.pop(_CHECKSUM, None)
    if stated != _checksum(value):
        raise DataError(
            f"{path} is damaged: its content does not have the checksum that it states; {remedy}"
        )
    return value


def _checksum(value: dict[str, Any]) -> str:
    # Sorted and without spaces, so that the checksum does not depend on how the file is laid out.
    content = utf8(json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")))
    return hashlib.sha256(content).hexdigest()


def read_form(path: Path, form: TypeAdapter[T], remedy: str = REMAKE) -> T:
    """Read a JSON file and validate its content.

    Args:
        remedy: Clause that says what to do about damage.

    Raises:
        DataError: As `read_json` and `in_form`.
    """
    return in_form(read_json(path, remedy), form, path, remedy)


def read_json(path: Path, remedy: str = REMAKE) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        remedy: Clause that says what to do about damage.

    Raises:
        DataError: If the file cannot be read or holds no JSON object; the message ends in `remedy`.
    """
    with refusing(f"read {path}"):
        content = read_regular(path)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold a JSON object; {remedy}")
    return value
