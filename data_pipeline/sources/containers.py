"""Lines of plain and packed input files, hashed while they are read.

The ending of the name tells the format. A zstd file may have several frames and any window up to 2 GiB; where
a frame is damaged, reading goes on at the next one.
"""

from __future__ import annotations

import functools
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import zstandard

from data_pipeline.io.files import refusing
from data_pipeline.sources.discovery import Piece

# One or a few zstd blocks: where a file is damaged, what came before them is not lost.
_READ_BYTES = 1 << 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LARGEST_WINDOW = 1 << 31


class HashedStream(io.RawIOBase):
    """Stream of a file that hashes a piece's bytes as they are read, each once and in order.

    Bytes may be skipped or read again; `hexdigest` reads those that were skipped. The stream ends where the
    file ended when it was found, however much has been appended since.
    """

    def __init__(self, raw: BinaryIO, piece: Piece) -> None:
        self._raw = raw
        self._end, self._size = piece.end, piece.file.size
        self._hashed = piece.start
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        position = self._raw.tell()
        view = memoryview(buffer).cast("B")[: max(0, self._size - position)]
        count = self._raw.readinto(view) or 0  # type: ignore[attr-defined]
        first, last = self._hashed - position, min(position + count, self._end) - position
        if 0 <= first < last:
            self._digest.update(view[first:last])
            self._hashed += last - first
        return count

    @property
    def missing(self) -> int:
        """Return the number of bytes between the position and the end that the file was found with."""
        return max(0, self._size - self.tell())

    def hexdigest(self) -> str:
        """Return the SHA-256 of the bytes from start to before end."""
        self._raw.seek(self._hashed)
        while self._hashed < self._end and self.read(min(1 << 22, self._end - self._hashed)):
            pass
        return self._digest.hexdigest()


def hash_of(piece: Piece) -> str:
    """Return the SHA-256 of a piece's bytes; DataError if they cannot be read."""
    with refusing(f"read {piece.file.path}"), piece.file.open() as raw:
        return HashedStream(raw, piece).hexdigest()


class DamageError(Exception):
    """Loss of bytes of a packed file. `reason`: `truncated` or `damaged`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def lines_of(stream: HashedStream, piece: Piece) -> Iterator[bytes | DamageError]:
    """Iterate over the lines of a plain or packed file, and over the places where bytes are lost.

    The longest line bounds the memory. A part of a plain file has the lines that begin in it. After a damage
    the rest of the broken line, and of the line that was under way where reading goes on, may come as lines
    of their own.
    """
    name = piece.file.name.lower()
    if name.endswith((".zst", ".zstd")):
        # zstandard's own readers stop after the first frame, or end silently in one that is cut.
        zstd = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj
        return _split_lines(_decompressed(stream, zstd, zstandard.ZstdError, _ZSTD_MAGIC))
    if name.endswith(".gz"):
        gzip = functools.partial(zlib.decompressobj, zlib.MAX_WBITS | 16)
        return _split_lines(_decompressed(stream, gzip, zlib.error))
    if name.endswith(".xz"):
        xz = functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)
        return _split_lines(_decompressed(stream, xz, lzma.LZMAError))
    return _plain_lines(stream, piece)


def _plain_lines(raw: HashedStream, piece: Piece) -> Iterator[bytes | DamageError]:
    stream = io.BufferedReader(raw, 1 << 18)
    position = piece.start
    if position:
        # The line that covers the byte before the part begins in an earlier one.
        stream.seek(position - 1)
        position += len(stream.readline()) - 1
    while position < piece.end:
        line = stream.readline()
        position += len(line)
        if not line.endswith(b"\n") and position < piece.file.size:
            yield DamageError("truncated", shortened(position, piece))
            break
        yield line
    stream.detach()  # it would close the file below it


def shortened(position: int, piece: Piece) -> str:
    """Describe an input that ends before the size that it was found with."""
    return f"the input ends at byte {position:,} of {piece.file.size:,}; what follows is lost"


def _split_lines(chunks: Iterator[bytes | DamageError]) -> Iterator[bytes | DamageError]:
    rest: list[bytes] = []
    for chunk in chunks:
        if isinstance(chunk, DamageError):
            rest = []  # a line of which the end is lost
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


def _decompressed(
    stream: HashedStream, begin: Callable[[], Any], broken: type[Exception], sign: bytes = b""
) -> Iterator[bytes | DamageError]:
    """Decompress all frames of a zstd file, members of a gzip file, or streams of an xz file.

    Args:
        begin: makes the decompressor of one frame.
        broken: the error that the decompressor raises for damaged bytes.
        sign: how a frame begins: after a damage reading goes on there. Without one, what follows is lost, and
            zeros after a frame are padding.
    """
    start = 0  # where the frame begins that is being read
    decompressor = None
    chunk = b""
    while chunk or (chunk := stream.read(_READ_BYTES)):
        if decompressor is None:
            chunk = chunk if sign else chunk.lstrip(b"\x00")
            if not chunk:
                continue
            start = stream.tell() - len(chunk)
            decompressor = begin()
        try:
            yield decompressor.decompress(chunk)
        except broken as error:
            if not sign:
                yield DamageError("damaged", f"{error}; what follows is lost")
                return
            following = _find(stream, sign, start + 1)
            where = (
                "what follows is lost"
                if following is None
                else f"reading goes on at byte {following:,}"
            )
            yield DamageError(
                "damaged", f"the frame at byte {start:,} is broken ({error}); {where}"
            )
            if following is None:
                return
            stream.seek(following)
            chunk, decompressor = b"", None
            continue
        chunk = decompressor.unused_data if decompressor.eof else b""
        if decompressor.eof:
            decompressor = None
    if decompressor is not None or stream.missing:
        yield DamageError("truncated", "the file is cut short; what follows is lost")


def _find(stream: HashedStream, sign: bytes, start: int) -> int | None:
    """Return the place of a sign, from `start` on."""
    stream.seek(start)
    kept = b""
    while chunk := stream.read(_READ_BYTES):
        chunk = kept + chunk
        place = chunk.find(sign)
        if place >= 0:
            return stream.tell() - len(chunk) + place
        kept = chunk[-(len(sign) - 1) :]
    return None
