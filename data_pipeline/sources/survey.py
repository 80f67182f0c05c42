"""Survey of the inputs: the files or objects that are read, and every entry that is not, with the reason.

Inputs are files and directories of this machine, or URLs of objects, prefixes and patterns in one store.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.sources.remote import RemoteObject, is_url
from data_pipeline.sources.stores import has_pattern, information, listing, pinned, scheme_of, stated

# Endings of the names, whatever their case: what a file holds, and how it is packed.
_PACKED = ("", ".zst", ".zstd", ".gz", ".xz")
SUFFIXES = (
    *(f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in _PACKED),
    *(f".json{packed}" for packed in _PACKED if packed),
    ".parquet",
    ".txt",
)
KNOWN_ENDINGS = (
    ".jsonl or .ndjson (also .zst, .zstd, .gz, .xz), .json.zst, .json.gz, .json.xz, .parquet, .txt"
)

# What is beside the data in every download and is not meant to be read; the last ones are our own.
_COMPANIONS = re.compile(
    r"(readme|licen[cs]e)([._-].*)?|(download|download\.unfinished|corpus)\.json", re.IGNORECASE
)
COMPANION = "left out"


@dataclass(frozen=True)
class PassedOver:
    """Entry that is not read. `reason` is COMPANION for entries that nobody expects to be read."""

    name: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """Files or objects to read, and the entries that are not read, both sorted.

    root: the directory or prefix that all inputs have in common, with a slash at its end.
    """

    root: str
    files: tuple[Path, ...] | tuple[RemoteObject, ...]
    passed_over: tuple[PassedOver, ...]


def survey(inputs: Sequence[str | Path]) -> Survey:
    """Find the files among `inputs` and below the directories, prefixes and patterns among them.

    Raises:
        DataError: an input is missing, no regular file, or of an unknown ending; inputs in several places;
        the store does not answer.
    """
    urls = [str(entry) for entry in inputs if is_url(entry)]
    if not urls:
        return _survey_local([Path(entry) for entry in inputs])
    if len(urls) < len(inputs):
        raise DataError(
            f"{urls[0]} is not on this machine, but other inputs are; tokenise each into a directory of its "
            f"own and train on a blend of them"
        )
    return _survey_remote(urls)


def unread(passed_over: Iterable[PassedOver]) -> list[PassedOver]:
    """Return the entries that somebody may have meant to be read."""
    return [entry for entry in passed_over if entry.reason != COMPANION]


def companions(passed_over: Iterable[PassedOver]) -> list[PassedOver]:
    """Return the entries that nobody expects to be read."""
    return [entry for entry in passed_over if entry.reason == COMPANION]


def describe(passed_over: Iterable[PassedOver], at_most: int = 5) -> list[str]:
    """Describe entries by reason, with the first names, in lines for the console."""
    entries = list(passed_over)
    lines = []
    for reason, count in sorted(Counter(entry.reason for entry in entries).items()):
        names = [entry.name for entry in entries if entry.reason == reason]
        rest = f" and {count - at_most:,} more" if count > at_most else ""
        title = "left out" if reason == COMPANION else f"not read ({reason})"
        lines.append(f"{title}: {', '.join(names[:at_most])}{rest}")
    return lines


def _why_not(name: str, size: int) -> str | None:
    """Return why a file or object of this name is not read; None if it is."""
    if not name.lower().endswith(SUFFIXES):
        return "unknown ending"
    return "empty" if size == 0 else None


def _is_companion(name: str) -> bool:
    return name.startswith(".") or _COMPANIONS.fullmatch(name) is not None


def _by_name(passed_over: Iterable[PassedOver]) -> tuple[PassedOver, ...]:
    return tuple(sorted(passed_over, key=lambda entry: entry.name))


def _survey_local(inputs: list[Path]) -> Survey:
    """Survey files and directories. Links to directories are followed; one reached twice is read once."""
    files: list[Path] = []
    passed_over: list[PassedOver] = []
    for entry in inputs:
        if entry.is_dir():
            for below in _Walk(entry).entries():
                if isinstance(below, PassedOver):
                    passed_over.append(below)
                else:
                    files.append(below)
            continue
        reason = _why_not_file(entry)
        if reason == "broken link" or not entry.exists():
            raise DataError(f"input {entry} does not exist; give a file or a directory of files")
        if reason == "unknown ending":
            raise DataError(f"input {entry} has an unknown ending; known are {KNOWN_ENDINGS}")
        if reason is not None:
            passed_over.append(PassedOver(str(entry), reason))
        else:
            files.append(entry)
    root = os.path.commonpath([os.path.abspath(e if e.is_dir() else e.parent) for e in inputs] or ["/"])
    # abspath, not resolve: the hub's cache is symlinks to files whose own names say nothing.
    absolute = sorted(Path(os.path.abspath(path)) for path in files)
    return Survey(root.rstrip("/") + "/", tuple(absolute), _by_name(passed_over))


class _Walk:
    """Walk over a directory tree. Real directories come before links, so that no link takes their place."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read_as: dict[tuple[int, int], str] = {}

    def entries(self) -> Iterator[Path | PassedOver]:
        links = yield from self._below(self._root)
        while links:
            linked = links.pop(0)
            links += yield from self._below(linked)

    def _below(self, directory: Path) -> Generator[Path | PassedOver, None, list[Path]]:
        """Yield the entries of a directory and the real ones below; return the links to directories."""
        waiting = [directory]
        links: list[Path] = []
        while waiting:
            place = waiting.pop()
            name = place.relative_to(self._root).as_posix()
            try:
                status = os.stat(place)
                identity = status.st_dev, status.st_ino
                if identity in self._read_as:
                    yield PassedOver(name, f"the same directory as {self._read_as[identity]}")
                    continue
                self._read_as[identity] = name
                with os.scandir(place) as scanned:
                    children = sorted(scanned, key=lambda entry: entry.name)
            except OSError as error:
                yield PassedOver(name, (error.strerror or str(error)).lower())
                continue
            for entry in children:
                path = place / entry.name
                if _is_companion(entry.name):
                    yield PassedOver(path.relative_to(self._root).as_posix(), COMPANION)
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif entry.is_dir():
                    links.append(path)
                elif (reason := _why_not_file(path)) is not None:
                    yield PassedOver(path.relative_to(self._root).as_posix(), reason)
                else:
                    yield path
        return links


def _why_not_file(path: Path) -> str | None:
    """Return why a file is not read; None if it is. Nothing is opened: a pipe would never answer."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "broken link"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        return kinds.get(stat.S_IFMT(status.st_mode), "a device")
    return _why_not(path.name, status.st_size)


def _survey_remote(urls: list[str]) -> Survey:
    """Survey URLs: each names an object, all below a prefix, or all that a pattern fits.

    A web server has no listing: of https:// every file is named.
    """
    urls = [pinned(_without_credentials(url)) for url in urls]
    roots = [_root_of(url) for url in urls]
    places = {"/".join(root.split("/")[: 5 if root.startswith("hf://") else 3]) for root in roots}
    if len(places) > 1:
        raise DataError(
            f"inputs lie in several places ({' and '.join(sorted(places))}); tokenise each into a directory "
            f"of its own and train on a blend of them"
        )
    root = os.path.commonpath([root.partition("://")[2] for root in roots])
    root = f"{scheme_of(urls[0])}://{root}/"
    files: list[RemoteObject] = []
    passed_over: list[PassedOver] = []
    for url in urls:
        for entry in _objects(url):
            name = entry.url.removeprefix(root)
            if any(_is_companion(part) for part in name.split("/")):
                passed_over.append(PassedOver(name, COMPANION))
            elif (reason := _why_not(name, entry.size)) is None:
                files.append(entry)
            elif entry.url == url and reason == "unknown ending":
                raise DataError(f"input {url} has an unknown ending; known are {KNOWN_ENDINGS}")
            else:
                passed_over.append(PassedOver(name, reason))
    return Survey(root, tuple(sorted(files, key=lambda entry: entry.url)), _by_name(passed_over))


def _without_credentials(url: str) -> str:
    if "@" in url.split("/")[2]:
        raise DataError(
            f"an input's URL holds credentials, which would be written down; leave them out: "
            f"{scheme_of(url)}://…"
        )
    return url


def _root_of(url: str) -> str:
    """Return the prefix of a URL's objects: the URL itself, or the directory of an object or pattern."""
    if has_pattern(url):
        url = url[: re.search(r"[*?\[]", url).start()]  # type: ignore[union-attr]
        return url.rpartition("/")[0]
    if url.lower().endswith(SUFFIXES):
        return url.rpartition("/")[0]
    return url.rstrip("/")


def _objects(url: str) -> list[RemoteObject]:
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        return [_object(url, information(url))]
    if not has_pattern(url) and url.lower().endswith(SUFFIXES):
        entry = information(url)
        if entry["type"] == "file":
            return [_object(url, entry)]
    entries = listing(url)
    if not entries:
        raise DataError(f"input {url} does not exist; give an object, a prefix or a pattern")
    return [_object(f"{scheme}://{path}", entry) for path, entry in entries.items()]


def _object(url: str, entry: dict[str, object]) -> RemoteObject:
    size, version = stated(entry)
    if size is None:
        raise DataError(f"cannot read {url}: its server does not say how long it is; download it first")
    return RemoteObject(url, size, version)
