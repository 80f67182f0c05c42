"""Inputs of the pipeline: the files or objects that are read, and every entry that is not, with the reason.

Inputs are files and directories of this machine, or URLs of objects, prefixes and patterns in one store.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from data_pipeline.errors import DataError
from data_pipeline.io.files import refusing
from data_pipeline.sources.remote import RemoteObject, is_url
from data_pipeline.sources.stores import (
    WEB,
    has_pattern,
    information,
    listing,
    pinned,
    scheme_of,
    stated,
)

_PLAIN_LINES = (".jsonl", ".ndjson")
# Endings of the names, whatever their case: what a file holds, and how it is packed.
_TEXT = (".txt", ".md")
_PACKED = ("", ".zst", ".zstd", ".gz", ".xz")
SUFFIXES = (
    *(f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in _PACKED),
    *(f".json{packed}" for packed in _PACKED if packed),
    ".parquet",
    *_TEXT,
)
KNOWN_ENDINGS = ".jsonl or .ndjson (also .zst, .zstd, .gz, .xz), .json.zst, .json.gz, .json.xz, .parquet, .txt, .md"

# What is beside the data in every download and is not meant to be read; the last ones are our own. A name
# with an ending of data is data, but for texts: README.txt and README_de.md are not, readme_corpus.jsonl is.
_COMPANIONS = re.compile(
    rf"(readme|licen[cs]e)(\.txt|(?!.*({'|'.join(re.escape(s) for s in SUFFIXES if s != '.md')})$)[._-].*)?"
    r"|(download|download\.unfinished|corpus)\.json",
    re.IGNORECASE,
)
COMPANION = "left out"


@dataclass(frozen=True)
class RecordKeys:
    """Keys of the text and of the name of its source in a record; a dot goes one object down.

    A record without the source key belongs to `default_source`.
    """

    text: str = "text"
    source: str = "meta.redpajama_set_name"
    default_source: str = "default"


def is_wanted(source: str, only: tuple[str, ...], never: tuple[str, ...]) -> bool:
    """Return whether documents of a source are used: of `only`, if there are any, and never of `never`."""
    return source not in never and (not only or source in only)


@dataclass(frozen=True)
class InputFile:
    """Input file. `name` is its path below the inputs' common directory or prefix, wherever that lies.

    path: a file of this machine, or an object of a store.
    """

    path: Path | RemoteObject
    name: str
    size: int

    @property
    def version(self) -> str:
        """Return the store's name for the content; empty for a file, and where a store says nothing."""
        return self.path.version if isinstance(self.path, RemoteObject) else ""

    def open(self) -> BinaryIO:
        """Open the bytes, unbuffered; DataError if an object has changed."""
        if isinstance(self.path, RemoteObject):
            return cast(BinaryIO, self.path.open())
        return cast(BinaryIO, open(self.path, "rb", buffering=0))

    def check_unchanged(self) -> None:
        """Raise DataError if an object has changed; a file's bytes are hashed when they are read."""
        if isinstance(self.path, RemoteObject):
            self.path.check_unchanged()

    @property
    def whole(self) -> Piece:
        """Return the whole input as a piece."""
        return Piece(self, 0, self.size)


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of an input. Only a plain .jsonl is ever read in parts."""

    file: InputFile
    start: int
    end: int

    @property
    def size(self) -> int:
        """Return the bytes on disk."""
        return self.end - self.start

    def __str__(self) -> str:
        """Return the file's path, with the byte range of a part."""
        if self.size == self.file.size:
            return str(self.file.path)
        return f"{self.file.path} (bytes {self.start}-{self.end})"


@dataclass(frozen=True)
class PassedOver:
    """Entry that is not read. `reason` is COMPANION for entries that nobody expects to be read."""

    name: str
    reason: str

    @property
    def expected(self) -> bool:
        """Return whether nobody may have meant the entry to be read."""
        return self.reason == COMPANION


@dataclass(frozen=True)
class Inputs:
    """Input files, and every entry beside them that is not read, both sorted by name."""

    files: list[InputFile]
    passed_over: tuple[PassedOver, ...] = ()


def find_inputs(inputs: Sequence[str | Path], chunks: str = "") -> Inputs:
    """Find the files among `inputs`, below directories, prefixes and patterns, of these chunks or of all.

    DataError: an input is missing, no regular file, of an unknown ending, or given twice; inputs lie in
    several places; there is none at all, or none of a chunk; the store does not answer.
    """
    urls = [str(entry) for entry in inputs if is_url(entry)]
    if urls and len(urls) < len(inputs):
        raise DataError(
            f"{urls[0]} is not on this machine, but other inputs are; tokenise each into a directory of its "
            f"own and train on a blend of them"
        )
    files, passed_over = (
        _find_remote(urls) if urls else _find_local([Path(entry) for entry in inputs])
    )
    if not files:
        names, there = ", ".join(map(str, inputs)), "; ".join(describe(passed_over))
        raise DataError(
            f"there is no {KNOWN_ENDINGS} file in {names}" + (f" ({there})" if there else "")
        )
    files.sort(key=lambda file: file.name)
    for file, following in itertools.pairwise(files):
        if file.name == following.name:
            kinds = "object or prefix" if urls else "file or directory"
            raise DataError(f"input {file.path} is given twice; name each {kinds} once")
    if chunks:
        wanted = parse_chunks(chunks)
        if missing := sorted(wanted - {chunk_of(file.name) for file in files}):
            raise DataError(f"--chunks: no input lies in a directory chunk{missing[0]}/")
        files = [file for file in files if chunk_of(file.name) in wanted]
    return Inputs(files, tuple(sorted(passed_over, key=lambda entry: entry.name)))


def cut_into_pieces(file: InputFile, range_bytes: int) -> list[Piece]:
    """Cut a plain .jsonl or .ndjson larger than `range_bytes` into ranges of that size."""
    if not file.name.lower().endswith(_PLAIN_LINES) or file.size <= range_bytes:
        return [file.whole]
    starts = range(0, file.size, range_bytes)
    return [Piece(file, start, min(start + range_bytes, file.size)) for start in starts]


def parse_chunks(text: str) -> frozenset[int]:
    """Read a list of chunks, `1,3-5` -> {1, 3, 4, 5}; DataError if it is none."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise DataError(f"--chunks {text!r} is not a list like 1,3-5")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def chunk_of(name: str) -> int | None:
    """Return N of the directory `chunkN` in an input's name, as SlimPajama has it; None without one."""
    match = re.search(r"(?:^|/)chunk(\d+)/", name)
    return int(match[1]) if match else None


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


def _is_companion(name: str, directory: bool = False) -> bool:
    return name.startswith(".") or (not directory and _COMPANIONS.fullmatch(name) is not None)


def _find_local(inputs: list[Path]) -> tuple[list[InputFile], list[PassedOver]]:
    """Find the files among paths of this machine and below the directories among them."""
    paths: list[Path] = []
    passed_over: list[PassedOver] = []
    for entry in inputs:
        if os.path.isdir(entry):  # unlike Path.is_dir, it never raises
            below = list(_entries_below(entry))
            paths += [path for path in below if isinstance(path, Path)]
            passed_over += [other for other in below if isinstance(other, PassedOver)]
            continue
        reason = _why_not_file(entry)
        if reason in ("broken link", "not a directory"):
            raise DataError(f"input {entry} does not exist; give a file or a directory of files")
        if reason == "unknown ending":
            raise DataError(f"input {entry} has an unknown ending; known are {KNOWN_ENDINGS}")
        if reason is not None:
            passed_over.append(PassedOver(str(entry), reason))
        else:
            paths.append(entry)
    # abspath, not resolve: the hub's cache is symlinks to files whose own names say nothing.
    places = [os.path.abspath(entry if os.path.isdir(entry) else entry.parent) for entry in inputs]
    root = os.path.commonpath(places or ["/"])
    files: list[InputFile] = []
    read_as: dict[tuple[int, int], str] = {}
    # Links come last, so that no link takes the place of a file.
    for path in sorted(
        (Path(os.path.abspath(path)) for path in paths), key=lambda p: (p.is_symlink(), p)
    ):
        with refusing(f"read {path}"):
            status = path.stat()
        name = path.relative_to(root).as_posix()
        first = read_as.setdefault((status.st_dev, status.st_ino), name)
        if first == name:
            files.append(InputFile(path, name, status.st_size))
        else:
            passed_over.append(PassedOver(name, f"the same file as {first}"))
    return files, passed_over


def _entries_below(root: Path) -> Iterator[Path | PassedOver]:
    """Yield the files below a directory, and the entries that are not read.

    Links to directories are followed, and a directory reached twice is read once. Links wait until there are
    no real directories left, so that no link takes the place of one.
    """
    read_as: dict[tuple[int, int], str] = {}
    real, links = [root], list[Path]()
    while real or links:
        place = real.pop() if real else links.pop(0)
        name = place.relative_to(root).as_posix()
        try:
            status = os.stat(place)
            first = read_as.setdefault((status.st_dev, status.st_ino), name)
            if first != name:
                yield PassedOver(name, f"the same directory as {first}")
                continue
            with os.scandir(place) as scanned:
                children = sorted(scanned, key=lambda entry: entry.name)
        except OSError as error:
            yield PassedOver(name, (error.strerror or str(error)).lower())
            continue
        for entry in children:
            path = place / entry.name
            directory = os.path.isdir(
                path
            )  # entry.is_dir raises for a link that cannot be followed
            if _is_companion(entry.name, directory):
                yield PassedOver(path.relative_to(root).as_posix(), COMPANION)
            elif directory:
                (links if entry.is_symlink() else real).append(path)
            elif (reason := _why_not_file(path)) is not None:
                yield PassedOver(path.relative_to(root).as_posix(), reason)
            else:
                yield path


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


def _find_remote(urls: list[str]) -> tuple[list[InputFile], list[PassedOver]]:
    """Find objects: a URL names one, all below a prefix, or all that a pattern fits.

    A web server has no listing: of https:// every file is named.
    """
    for url in urls:
        if "@" in url.split("/")[2]:
            raise DataError(
                f"an input's URL holds credentials, which would be written down; leave them out: "
                f"{scheme_of(url)}://…"
            )
    urls = [pinned(url) for url in urls]
    roots = [_root_of(url) for url in urls]
    places = {"/".join(root.split("/")[: 5 if root.startswith("hf://") else 3]) for root in roots}
    if len(places) > 1:
        raise DataError(
            f"inputs lie in several places ({' and '.join(sorted(places))}); tokenise each into a directory "
            f"of its own and train on a blend of them"
        )
    root = os.path.commonpath([root.partition("://")[2] for root in roots])
    root = f"{scheme_of(urls[0])}://{root}/"
    files: list[InputFile] = []
    passed_over: list[PassedOver] = []
    for url in urls:
        for entry in _objects(url):
            name = entry.url.removeprefix(root)
            *above, last = name.split("/")
            if _is_companion(last) or any(_is_companion(part, directory=True) for part in above):
                passed_over.append(PassedOver(name, COMPANION))
            elif (reason := _why_not(name, entry.size)) is None:
                files.append(InputFile(entry, name, entry.size))
            elif entry.url == url and reason == "unknown ending":
                raise DataError(f"input {url} has an unknown ending; known are {KNOWN_ENDINGS}")
            else:
                passed_over.append(PassedOver(name, reason))
    return files, passed_over


def _root_of(url: str) -> str:
    """Return the prefix of a URL's objects: the URL itself, or the directory of an object or pattern."""
    if has_pattern(url) or url.lower().endswith(SUFFIXES):
        return re.split(r"[*?\[]", url)[0].rpartition("/")[0]
    return url.rstrip("/")


def _objects(url: str) -> list[RemoteObject]:
    scheme, named = scheme_of(url), not has_pattern(url) and url.lower().endswith(SUFFIXES)
    if scheme in WEB or named:
        entry = information(url)
        if scheme in WEB or entry["type"] == "file":
            return [_object(url, entry)]
    entries = listing(url)
    if not entries:
        raise DataError(f"input {url} does not exist; give an object, a prefix or a pattern")
    return [_object(f"{scheme}://{path}", entry) for path, entry in entries.items()]


def _object(url: str, entry: dict[str, object]) -> RemoteObject:
    size, version = stated(entry)
    if size is None:
        raise DataError(
            f"cannot read {url}: its server does not say how long it is; download it first"
        )
    return RemoteObject(url, size, version)
