"""Bytes and lines of plain and packed input files, hashed while they are read.

A zstd file may have several frames and any window up to 2 GiB; where a frame is damaged, reading
continues at the next one.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from data_pipeline.io.files import refusing
from data_pipeline.sources.discovery import InputFile
from data_pipeline.sources.formats import Packing

# One or a few zstd blocks: where a file is damaged, what came before them is not lost.
_READ_BYTES = 1 << 16
_HASHED_BYTES = 1 << 22


class HashedStream(io.RawIOBase):
    """Stream of a file that hashes the bytes as they are read, each once and in order.

    Bytes may be skipped or read again; `hexdigest` reads those that were skipped. The stream ends
    where the file ended at discovery, however much has been appended since.

    Args:
        raw: File, opened without a buffer.
        size: Bytes of the file at discovery.
    """

    def __init__(self, raw: BinaryIO, size: int) -> None:
        self._raw = raw
        self._size = size
        self._hashed = 0
        self._digest = hashlib.sha256()

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position.

        Args:
            offset: Bytes.
            whence: Base of the offset, as in `io.IOBase.seek`.
        """
        return self._raw.seek(offset, whence)

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        position = self._raw.tell()
        view = memoryview(buffer).cast("B")[: max(0, self._size - position)]
        count: int = self._raw.readinto(view) or 0  # type: ignore[attr-defined]
        # Bytes before `first` are hashed already; a gap before the position stays for `hexdigest`.
        first = self._hashed - position
        if 0 <= first < count:
            self._digest.update(view[first:count])
            self._hashed += count - first
        return count

    @property
    def hashed(self) -> int:
        """Return the number of bytes read so far, counted from the beginning."""
        return self._hashed

    @property
    def missing(self) -> int:
        """Return the number of bytes between the position and the size at discovery."""
        return max(0, self._size - self.tell())

    def hexdigest(self) -> str:
        """Return the SHA-256 of the whole file."""
        self._raw.seek(self._hashed)
        while self.read(_HASHED_BYTES):
            pass
        return self._digest.hexdigest()


def hash_of(file: InputFile) -> str:
    """Return the SHA-256 of a file's bytes; DataError if they cannot be read."""
    with refusing(f"read {file.path}"), file.open() as raw:
        return HashedStream(raw, file.size).hexdigest()


class DamageError(Exception):
    """Loss of bytes of a file.

    Args:
        reason: `truncated` or `damaged`.
        detail: Clause that says what was lost.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def chunks_of(stream: HashedStream, packing: Packing | None) -> Iterator[bytes | DamageError]:
    """Iterate over the unpacked bytes of a file, with a DamageError where bytes are lost.

    Args:
        packing: Compression of the file; None for a plain file.
    """
    return _plain(stream) if packing is None else _unpacked(stream, packing)


def _plain(stream: HashedStream) -> Iterator[bytes | DamageError]:
    while chunk := stream.read(_READ_BYTES):
        yield chunk
    if stream.missing:
        end = stream.tell()
        where = f"byte {end:,} of {end + stream.missing:,}"
        yield DamageError("truncated", f"the input ends at {where}; what follows is lost")


def split_lines(chunks: Iterable[bytes | DamageError]) -> Iterator[bytes | DamageError]:
    """Yield the lines of a file without their ends, with a DamageError where bytes are lost.

    The longest line bounds the memory. After damage, the rest of the broken line, and the rest of
    the line at which reading continues, may come as lines of their own.
    """
    rest: list[bytes] = []
    for chunk in chunks:
        if isinstance(chunk, DamageError):
            rest = []  # the end of this line is lost
            yield chunk
            continue
        lines = chunk.split(b"\n")
        rest.append(lines[0])
        if len(lines) > 1:
            lines[0] = b"".join(rest)
            rest = [lines.pop()]
            yield from lines
    last = b"".join(rest)
    if last:
        yield last


def _unpacked(stream: HashedStream, packing: Packing) -> Iterator[bytes | DamageError]:
    """Decompress all frames of a file."""
    start = 0  # of the present frame, in bytes
    decompressor = None
    begun = False
    chunk = b""
    while chunk or (chunk := stream.read(_READ_BYTES)):
        if decompressor is None:
            # Zeros between frames are padding where frames have no magic to search for.
            chunk = chunk if packing.magic else chunk.lstrip(b"\x00")
            if not chunk:
                continue
            start = stream.tell() - len(chunk)
            decompressor = packing.begin()
            begun = True
        try:
            yield decompressor.decompress(chunk)
        except packing.broken as error:
            following = _find_magic(stream, packing.magic, start + 1) if packing.magic else None
            yield _broken_frame(start, error, following, packing)
            if following is None:
                return
            stream.seek(following)
            chunk = b""
            decompressor = None
            continue
        chunk = decompressor.unused_data if decompressor.eof else b""
        if decompressor.eof:
            decompressor = None
    if decompressor is not None or stream.missing:
        yield DamageError("truncated", "the file is cut short; what follows is lost")
    elif not begun and stream.hashed:
        yield DamageError("damaged", "the file holds zeros alone")


def _broken_frame(
    start: int, error: Exception, following: int | None, packing: Packing
) -> DamageError:
    if not packing.magic:
        return DamageError("damaged", f"{error}; what follows is lost")
    where = "what follows is lost"
    if following is not None:
        where = f"reading continues at byte {following:,}"
    return DamageError("damaged", f"the frame at byte {start:,} is broken ({error}); {where}")


def _find_magic(stream: HashedStream, magic: bytes, start: int) -> int | None:
    """Return the offset of the first `magic` from `start` on."""
    stream.seek(start)
    tail = b""
    while chunk := stream.read(_READ_BYTES):
        chunk = tail + chunk
        offset = chunk.find(magic)
        if offset >= 0:
            return stream.tell() - len(chunk) + offset
        # The magic may begin in this chunk and end in the next.
        tail = chunk[-(len(magic) - 1) :]
    return None
