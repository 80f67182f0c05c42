"""Requests to the stores of inputs, through fsspec: s3://, https:// and hf://.

A request has a time limit and is repeated, with growing pauses, while the network fails. (s3fs
retries by itself; fsspec's HTTP does not.) Errors are the same sentences for all stores. Keys,
endpoints and proxies come from the environment, as each store's own library reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from data_pipeline.errors import DataError, needs_extra

_T = TypeVar("_T")

# Keys of an object's version in the stores; the date of change is the last resort.
_VERSIONS = ("ETag", "etag", "blob_id", "Last-Modified")
# The extra to install, and how its library gets credentials, by scheme.
_EXTRAS = MappingProxyType({"s3": "s3", "http": "http", "https": "http", "hf": "hub"})
_KEYS = MappingProxyType(
    {
        "s3": "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=1 "
        "for a public bucket",
        "hf": "give HF_TOKEN, and accept the data set's terms on the hub",
    }
)
_NO_KEYS = ("NoCredentialsError", "PartialCredentialsError")
WEB = ("http", "https")
# Statuses below 500 after which a second request may succeed.
_PASSING_STATUS = (408, 425, 429)


@dataclass(frozen=True)
class Patience:
    """Limits of a request; six attempts take about 16 s plus the time of the requests.

    Attributes:
        attempts: Number of attempts.
        first_pause: Seconds of pause after the first failure; each further pause is twice as long.
        seconds: Limit of one attempt.
        listing_seconds: Limit of a whole listing, which takes one request per thousand objects.
    """

    attempts: int = 6
    first_pause: float = 0.5
    seconds: float = 60.0
    listing_seconds: float = 900.0


PATIENCE = Patience()


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, `s3` of `s3://bucket/key`.

    Raises:
        DataError: If the scheme is unknown.
    """
    scheme = url.partition("://")[0]
    if scheme not in _EXTRAS:
        known_schemes = ", ".join(f"{name}://" for name in _EXTRAS)
        raise DataError(f"input {url}: {scheme}:// is unknown; known are {known_schemes}")
    return scheme


def filesystem(url: str) -> Any:
    """Open fsspec's file system for a URL; listings are not cached, since objects change.

    Raises:
        DataError: If a package is missing, or a file of credentials cannot be used.
    """
    scheme = scheme_of(url)
    try:
        with needs_extra(f"{scheme}://", _EXTRAS[scheme]):
            import fsspec

            options: dict[str, Any] = {"use_listings_cache": False}
            if scheme in WEB:
                # Ranges are of the file's bytes, not of what a server compresses on the way.
                options["headers"] = {"Accept-Encoding": "identity"}
            return fsspec.filesystem(scheme, **options)
    except DataError:
        raise
    except (OSError, ValueError, KeyError) as error:
        local = isinstance(error, FileNotFoundError | PermissionError | ValueError | KeyError)
        if not local:
            raise  # an error of the network
        reason = " ".join(str(error).split())
        keys = _KEYS.get(scheme, "see docs/data.md")
        raise DataError(
            f"the credentials for {scheme}:// cannot be used ({reason}): {keys}"
        ) from error


def call(seconds: float, name: str, url: str, **options: Any) -> Any:
    """Call a method of the file system, with a time limit.

    Args:
        seconds: Limit; hf:// has its own limits for every wait.
        name: Name of the method.
        url: First argument of the method.
        **options: the others.
    """
    store = filesystem(url)
    if store.async_impl:
        options["timeout"] = seconds
    return getattr(store, name)(url, **options)


def pinned(url: str) -> str:
    """Pin a URL of the hub to the repository's present commit; return other URLs unchanged."""
    if scheme_of(url) != "hf":
        return url

    def once() -> str:
        place = filesystem(url).resolve_path(url)
        import huggingface_hub

        if not hasattr(place, "repo_id"):
            return url  # a bucket has no commits
        repository = huggingface_hub.HfApi().repo_info(
            place.repo_id, revision=place.revision, repo_type=place.repo_type
        )
        kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
        return f"hf://{kind}{place.repo_id}@{repository.sha}/{place.path_in_repo}".rstrip("/")

    return ask(url, once)


def listing(url: str) -> dict[str, dict[str, Any]]:
    """List the objects of a prefix or pattern, with what fsspec states, by path."""

    def once() -> dict[str, dict[str, Any]]:
        filesystem(url).invalidate_cache()
        how = "glob" if has_pattern(url) else "find"
        entries = call(PATIENCE.listing_seconds, how, url, detail=True)
        files = {path: entry for path, entry in entries.items() if entry["type"] == "file"}
        # Web consoles create folders as empty objects named `…/`.
        return {
            path: entry
            for path, entry in files.items()
            if entry.get("size") or not path.endswith("/")
        }

    return ask(url, once)


def has_pattern(url: str) -> bool:
    """Return whether a URL names several objects by `*`, `?` or `[`."""
    return any(sign in url for sign in "*?[")


def information(url: str) -> dict[str, Any]:
    """Return what fsspec states about an object."""

    def once() -> dict[str, Any]:
        filesystem(url).invalidate_cache()
        entry: dict[str, Any] = call(PATIENCE.seconds, "info", url)
        return entry

    return ask(url, once)


def stated(entry: dict[str, Any]) -> tuple[int | None, str]:
    """Return (size in bytes, version) of an object, from what fsspec states about it."""
    if (lfs := entry.get("lfs")) is not None:
        return entry.get("size"), str(lfs["sha256"])
    version = next((str(entry[key]).strip('"') for key in _VERSIONS if entry.get(key)), "")
    return entry.get("size"), version


def ask(url: str, request: Callable[[], _T]) -> _T:
    """Make a request, repeat it with growing pauses while the network fails, and return its answer.

    Args:
        url: URL of the object, for messages.
        request: One attempt.

    Raises:
        DataError: If there is no such object, it may not be read, or the network keeps failing.
    """
    started = time.monotonic()
    pause = PATIENCE.first_pause
    for attempt in range(1, PATIENCE.attempts + 1):
        try:
            return request()
        except DataError:
            raise
        except Exception as raised:  # every store's library has errors of its own
            error = raised
            # fsspec's HTTP raises FileNotFoundError for any failure, even if no server answers.
            if scheme_of(url) in WEB and isinstance(raised, FileNotFoundError):
                error = raised.__cause__ if isinstance(raised.__cause__, Exception) else raised
            if (sentence := _final(url, error)) is not None:
                raise DataError(sentence) from error
            if attempt == PATIENCE.attempts:
                reason = " ".join(str(error).split()) or type(error).__name__
                took = f"{attempt} attempts in {time.monotonic() - started:.0f} s"
                raise DataError(
                    f"cannot read {url}: {reason} ({took}); what is finished is kept: run the same "
                    f"command again"
                ) from error
        time.sleep(pause)
        pause *= 2
    raise AssertionError("every attempt returns or raises")


def _final(url: str, error: Exception) -> str | None:
    """Describe an error that a repeated request would not change; None for any other."""
    scheme = scheme_of(url)
    keys = _KEYS.get(scheme, "the server needs credentials; download it first")
    status = _status_of(error)
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


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status behind an error, as each store's library states it."""
    answer = getattr(error, "response", None)
    stated = (
        getattr(error, "status", None),
        getattr(answer, "status_code", None),
        getattr(error, "code", None),
    )
    return next((status for status in stated if isinstance(status, int)), None)
