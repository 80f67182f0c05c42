"""Inputs that lie in an object store or on a web server: s3://, gs://, https:// and hf://, through fsspec.

An object is read in blocks, each a request of its own with a time limit, repeated with growing pauses where
the network fails: so a connection that breaks costs a block. What an object is at the beginning (its size and
the version that the store states) must still be so before and after it is read.

Keys, endpoints and proxies are the environment's, as each store's own library knows them.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from data_pipeline.errors import DataError

_T = TypeVar("_T")

# Large enough that a request's latency is small beside it; two are held, one of them on its way.
BLOCK_BYTES = 8 << 20
# What an object's version is called by each store; a date of change only where there is nothing better.
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "Last-Modified")
# What to install, by scheme, and how its library is given keys.
_EXTRAS = MappingProxyType({"s3": "s3", "gs": "gs", "http": "http", "https": "http", "hf": ""})
_KEYS = MappingProxyType(
    {
        "s3": "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=1 for a "
        "public bucket",
        "gs": "give GOOGLE_APPLICATION_CREDENTIALS; FSSPEC_GS_TOKEN=anon for a public bucket",
        "hf": "give HF_TOKEN, and accept the data set's terms on the hub",
    }
)
_NO_KEYS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
# Answers that a second request may well change, of those that blame the request.
_PASSING_STATUS = (408, 425, 429)


@dataclass(frozen=True)
class Patience:
    """How long a request may take and how often it is made: six times within about 16 s and its own time."""

    attempts: int = 6
    first_pause: float = 0.5
    seconds: float = 60.0


PATIENCE = Patience()


def is_url(place: object) -> bool:
    """Whether an input is named by its scheme, and not by a path."""
    return "://" in str(place)


def scheme_of(url: str) -> str:
    """`s3` of `s3://bucket/key`.

    Raises:
        DataError: nothing is read from such a place.
    """
    scheme = url.partition("://")[0]
    if scheme not in _EXTRAS:
        raise DataError(
            f"input {url}: {scheme}:// is unknown; known are {', '.join(f'{s}://' for s in _EXTRAS)}"
        )
    return scheme


@dataclass(frozen=True)
class RemoteObject:
    """An object of a store. `version` is what the store calls this content; empty where it says nothing."""

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """The last part of its URL."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def open(self) -> RemoteStream:
        """The object, unbuffered.

        Raises:
            DataError: it is no longer what it was.
        """
        self.check_unchanged()
        return RemoteStream(self)

    def check_unchanged(self) -> None:
        """Raises:
        DataError: the object is gone, or the store states another size or version.
        """
        size, version = stated(ask(self.url, lambda: _info(self.url)))
        for what, now, before in (("size", size, self.size), ("version", version, self.version)):
            if now != before:
                raise DataError(
                    f"input {self.url} changed while it was being worked on: its {what} is {now}, it was "
                    f"{before}; restore it, or choose another --out"
                )


class RemoteStream(io.RawIOBase):
    """An object's bytes, a block at a time, the next one fetched while this one is worked on.

    Raises:
        DataError: by any reading, if a block cannot be had in spite of `PATIENCE`.
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
        """The block at the position; what follows it is asked for, unless the reader has jumped here."""
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
            content: bytes = _call(url, "cat_file", url, start=start, end=end)
            if len(content) == self._remote.size > end - start:
                raise DataError(f"cannot read {url} in blocks: its server ignores ranges; download it first")
            if len(content) != end - start:
                raise OSError(f"{len(content):,} bytes came where {end - start:,} were asked for")
            return content

        return ask(url, once)

    def close(self) -> None:
        """Let go of what is on its way."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        super().close()


def filesystem(url: str) -> Any:
    """What fsspec reads a URL with; it caches no listing, since objects change.

    Raises:
        DataError: a package is missing.
    """
    import fsspec

    scheme = scheme_of(url)
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise DataError(
            f"{scheme}:// needs a package that is not installed ({error}); "
            f"pip install 'ora-pretrain[{_EXTRAS[scheme]}]'"
        ) from error


def _call(url: str, name: str, *arguments: Any, **options: Any) -> Any:
    """A method of the filesystem, with a time limit; hf:// has limits of its own for every wait."""
    store = filesystem(url)
    if store.async_impl:
        options["timeout"] = PATIENCE.seconds
    return getattr(store, name)(*arguments, **options)


def _info(url: str) -> dict[str, Any]:
    filesystem(url).invalidate_cache()
    found: dict[str, Any] = _call(url, "info", url)
    return found


def listing(url: str) -> dict[str, dict[str, Any]]:
    """What fsspec states of every object below a prefix, or of the objects that a pattern names, by path.

    Raises:
        DataError: it cannot be had.
    """

    def once() -> dict[str, dict[str, Any]]:
        filesystem(url).invalidate_cache()
        found = _call(url, "glob" if has_pattern(url) else "find", url, detail=True)
        return {path: entry for path, entry in found.items() if entry["type"] == "file"}

    return ask(url, once)


def has_pattern(url: str) -> bool:
    """Whether a URL names several objects by `*`, `?` or `[`."""
    return any(sign in url for sign in "*?[")


def information(url: str) -> dict[str, Any]:
    """What fsspec states of one object.

    Raises:
        DataError: it cannot be had.
    """
    return ask(url, lambda: _info(url))


def stated(entry: dict[str, Any]) -> tuple[int | None, str]:
    """(size, version) of what fsspec says of an object."""
    if (lfs := entry.get("lfs")) is not None:
        return entry.get("size"), str(lfs["sha256"])
    version = next((str(entry[key]).strip('"') for key in _VERSIONS if entry.get(key)), "")
    return entry.get("size"), version


def ask(url: str, request: Callable[[], _T]) -> _T:
    """A request's answer, asked for again with growing pauses while the network fails.

    Raises:
        DataError: there is no such object, or it may not be read, or the network keeps failing.
    """
    started, pause = time.monotonic(), PATIENCE.first_pause
    for attempt in range(1, PATIENCE.attempts + 1):
        try:
            return request()
        except DataError:
            raise
        except Exception as error:  # every store's library has errors of its own, with no common base
            if (sentence := _final(url, error)) is not None:
                raise DataError(sentence) from error
            if attempt == PATIENCE.attempts:
                reason = " ".join(str(error).split()) or type(error).__name__
                took = f"{attempt} attempts in {time.monotonic() - started:.0f} s"
                raise DataError(
                    f"cannot read {url}: {reason} ({took}); what is finished is kept: run the same command "
                    f"again"
                ) from error
        time.sleep(pause)
        pause *= 2
    raise AssertionError("every attempt returns or raises")


def _final(url: str, error: Exception) -> str | None:
    """What is wrong, if asking again would not help."""
    scheme = scheme_of(url)
    keys = _KEYS.get(scheme, "the server wants credentials; download it first")
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if type(error).__name__ in _NO_KEYS:
        return f"there are no credentials for {url}: {keys}"
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"{url} may not be read with these credentials: {keys}"
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        private = " (or it is private and HF_TOKEN is not given)" if scheme == "hf" else ""
        return f"input {url} does not exist{private}; give an object, a prefix or a pattern"
    if isinstance(status, int) and 400 <= status < 500 and status not in _PASSING_STATUS:
        return f"cannot read {url}: {' '.join(str(error).split())}"
    return None
