"""Objects of a store as inputs, and streams of their bytes.

An object is read in blocks, one request each, so a broken connection costs one block.
The size and the version that the store states at the beginning must be the same before and after
the object is read.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from data_pipeline.errors import DataError
from data_pipeline.sources import stores
from data_pipeline.sources.stores import ask, call, information, stated

# Large enough that a request's latency is small beside it.
BLOCK_BYTES = 8 << 20
_COMMIT = re.compile("^hf://[^@]+@[0-9a-f]{40}/")


def is_url(place: object) -> bool:
    """Return whether an input is a URL, and not a path."""
    return "://" in str(place)


@dataclass(frozen=True)
class RemoteObject:
    """Object of a store.

    Attributes:
        url: URL of the object.
        size: Bytes.
        version: Store's name for the content; empty if the store has none.
    """

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def open(self) -> RemoteStream:
        """Open the object, unbuffered; DataError if it has changed."""
        self.check_unchanged()
        return RemoteStream(self)

    def check_unchanged(self) -> None:
        """Compare the size and version that the store states with those at discovery.

        Raises:
            DataError: If the object is gone or has changed.
        """
        if _COMMIT.search(self.url):
            return  # what a commit holds never changes
        size, version = stated(information(self.url))
        for key, now, old in (("size", size, self.size), ("version", version, self.version)):
            if now != old:
                raise DataError(
                    f"input {self.url} changed while it was being worked on: its {key} is {now}, "
                    f"it was {old}; restore it, or choose another --out"
                )


class RemoteStream(io.RawIOBase):
    """Stream of an object's bytes that holds one block in memory.

    Reading raises DataError if `stores.PATIENCE` ends before a block arrives.
    """

    def __init__(self, remote: RemoteObject) -> None:
        self._remote = remote
        self._position = 0
        self._first = 0  # position of the block
        self._block = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position.

        Args:
            offset: Bytes.
            whence: Base of the offset, as in `io.IOBase.seek`.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._remote.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        view = memoryview(buffer).cast("B")
        if self._position >= self._remote.size:
            return 0
        if not self._first <= self._position < self._first + len(self._block):
            self._block = self._fetch(self._position)
            self._first = self._position
        content = self._block[self._position - self._first :][: len(view)]
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _fetch(self, start: int) -> bytes:
        url = self._remote.url
        end = min(start + BLOCK_BYTES, self._remote.size)

        def once() -> bytes:
            content: bytes = call(stores.PATIENCE.seconds, "cat_file", url, start=start, end=end)
            if len(content) == self._remote.size > end - start:
                raise DataError(
                    f"cannot read {url} in blocks: its server ignores ranges; download it first"
                )
            if len(content) != end - start:
                raise OSError(f"received {len(content):,} bytes, asked for {end - start:,}")
            return content

        return ask(url, once)
