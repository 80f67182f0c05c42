"""Objects of a store as inputs, and streams of their bytes.

An object is read in blocks, each a request of its own, so a connection that breaks costs a block. The size
and the version that the store states at the beginning must be the same before and after the object is read.
"""

from __future__ import annotations

import io
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from data_pipeline.errors import DataError
from data_pipeline.sources import stores
from data_pipeline.sources.stores import ask, call, information, stated

# Large enough that a request's latency is small beside it; two are held, one of them on its way.
BLOCK_BYTES = 8 << 20
_COMMIT = re.compile("^hf://[^@]+@[0-9a-f]{40}/")


def is_url(place: object) -> bool:
    """Return whether an input is a URL, and not a path."""
    return "://" in str(place)


@dataclass(frozen=True)
class RemoteObject:
    """Object of a store. `version` is the store's name for the content; empty where the store has none."""

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
        """Raise DataError if the object is gone, or the store states another size or version."""
        if _COMMIT.search(self.url):
            return  # what a commit holds never changes
        size, version = stated(information(self.url))
        for what, now, before in (("size", size, self.size), ("version", version, self.version)):
            if now != before:
                raise DataError(
                    f"input {self.url} changed while it was being worked on: its {what} is {now}, it was "
                    f"{before}; restore it, or choose another --out"
                )


class RemoteStream(io.RawIOBase):
    """Stream of an object's bytes, a block at a time; the next block is fetched while one is worked on.

    Any reading raises DataError if a block cannot be had in spite of `stores.PATIENCE`.
    """

    def __init__(self, remote: RemoteObject) -> None:
        self._remote = remote
        self._position = 0
        self._first, self._block = 0, b""
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._ahead: tuple[int, Future[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._remote.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        view = memoryview(buffer).cast("B")
        if self._position >= self._remote.size:
            return 0
        if not self._first <= self._position < self._first + len(self._block):
            self._first, self._block = self._position, self._next_block()
        content = self._block[self._position - self._first :][: len(view)]
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _next_block(self) -> bytes:
        """Return the block at the position; request the one after it, unless the reader has jumped here."""
        start, following = self._position, self._first + len(self._block) == self._position
        if self._ahead is not None and self._ahead[0] == start:
            block = self._ahead[1].result()
        else:
            block = self._fetch(start)
        self._ahead = None
        after = start + len(block)
        if following and after < self._remote.size:
            self._ahead = after, self._fetcher.submit(self._fetch, after)
        return block

    def _fetch(self, start: int) -> bytes:
        url, end = self._remote.url, min(start + BLOCK_BYTES, self._remote.size)

        def once() -> bytes:
            if self.closed:  # nobody waits for this block any more
                raise DataError(f"{url} was closed")
            content: bytes = call(stores.PATIENCE.seconds, "cat_file", url, start=start, end=end)
            if len(content) == self._remote.size > end - start:
                raise DataError(
                    f"cannot read {url} in blocks: its server ignores ranges; download it first"
                )
            if len(content) != end - start:
                raise OSError(f"{len(content):,} bytes came where {end - start:,} were asked for")
            return content

        return ask(url, once)

    def close(self) -> None:
        """Give up requests that are under way."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        super().close()
