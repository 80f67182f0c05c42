"""Inputs of the pipeline: the files or objects that are read, and every entry that is not.

Inputs are files and directories of this machine, or URLs of objects, prefixes and patterns in one
store.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from data_pipeline.errors import DataError
from data_pipeline.io.files import refusing
from data_pipeline.io.home import expand_home
from data_pipeline.sources.formats import FORMATS, KNOWN_ENDINGS, foreign_name, format_of
from data_pipeline.sources.hub import UNFINISHED_NAME
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

# Files beside the data of a download that are not meant to be read; the last two are our own.
# A name with an ending of data is data, except for texts: README.txt and README_de.md are not data,
# readme_corpus.jsonl is.
_DATA = "|".join(re.escape(ending) for ending in FORMATS if ending != ".md")
_COMPANIONS = re.compile(
    rf"(readme|licen[cs]e)(\.txt|(?!.*({_DATA})$)[._-].*)?"
    r"|(download|corpus)\.json",
    re.IGNORECASE,
)
COMPANION = "left out"


@dataclass(frozen=True)
class RecordKeys:
    """Keys of a record; a dot goes one object down, unless the record has a key of that very name.

    Attributes:
        text: Key of the text, or several with `|` between them: the first that a record has.
        source: Key of the name of the text's source.
        default_source: Source of a record that names none.
    """

    text: str = "text"
    source: str = "meta.redpajama_set_name"
    default_source: str = "default"

    @property
    def text_keys(self) -> tuple[str, ...]:
        """Return the keys of the text, the preferred ones first."""
        return tuple(self.text.split("|"))


def is_wanted(source: str, only: tuple[str, ...], never: tuple[str, ...]) -> bool:
    """Return whether documents of a source are used.

    Args:
        only: Sources to use; empty means all.
        never: Sources not to use.
    """
    return source not in never and (not only or source in only)


@dataclass(frozen=True)
class InputFile:
    """Input file.

    Attributes:
        path: File of this machine, or object of a store.
        name: Path below the inputs' common directory or prefix, wherever that lies.
        size: Bytes on disk.
    """

    path: Path | RemoteObject
    name: str
    size: int

    @property
    def version(self) -> str:
        """Return the store's name for the content; empty for a file, or if the store has none."""
        return self.path.version if isinstance(self.path, RemoteObject) else ""

    def open(self) -> BinaryIO:
        """Open the bytes, unbuffered; DataError if an object has changed."""
        if isinstance(self.path, RemoteObject):
            return cast(BinaryIO, self.path.open())
        return cast(BinaryIO, open(self.path, "rb", buffering=0))

    def check_unchanged(self) -> None:
        """Raise DataError if an object has changed; a file's bytes are hashed when it is read."""
        if isinstance(self.path, RemoteObject):
            self.path.check_unchanged()


@dataclass(frozen=True)
class PassedOver:
    """Entry that is not read, and why; COMPANION for those that nobody expects to be read."""

    name: str
    reason: str

    @property
    def expected(self) -> bool:
        """Return whether nobody expects the entry to be read."""
        return self.reason == COMPANION


@dataclass(frozen=True)
class Inputs:
    """Input files, and every entry beside them that is not read, both sorted by name."""

    files: list[InputFile]
    passed_over: tuple[PassedOver, ...] = ()


def find_inputs(inputs: Sequence[str | Path]) -> Inputs:
    """Find the files among `inputs`, below directories, prefixes and patterns.

    Raises:
        DataError: If an input is missing, not a regular file, of an unknown ending, or given twice;
            if inputs lie in several places; if there is no input; if the store does not answer.
    """
    urls = [str(entry) for entry in inputs if is_url(entry)]
    if urls and len(urls) < len(inputs):
        raise DataError(
            f"{urls[0]} is not on this machine, but other inputs are; tokenise each into a "
            f"directory of its own and train on a blend of them"
        )
    if urls:
        files, passed_over = _find_remote(urls)
    else:
        files, passed_over = _find_local([expand_home(entry) for entry in inputs])
    if not files:
        names = ", ".join(map(str, inputs))
        passed_over_lines = "; ".join(describe(passed_over))
        raise DataError(
            f"there is no {KNOWN_ENDINGS} file in {names}"
            + (f" ({passed_over_lines})" if passed_over_lines else "")
        )
    files.sort(key=lambda file: file.name)
    for file, following in itertools.pairwise(files):
        if file.name == following.name:
            kinds = "object or prefix" if urls else "file or directory"
            raise DataError(f"input {file.path} is given twice; name each {kinds} once")
    return Inputs(files, tuple(sorted(passed_over, key=lambda entry: entry.name)))


def describe(passed_over: Iterable[PassedOver], at_most: int = 5) -> list[str]:
    """Describe entries by reason, in lines for the console.

    Args:
        at_most: Number of names given for each reason.
    """
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
    if PurePosixPath(name).name == UNFINISHED_NAME:
        return "its download has not ended; run the same download command again"
    if format_of(name) is None:
        return foreign_name(name) or "unknown ending"
    return "empty" if size == 0 else None


def _unknown(name: str) -> str:
    """Describe a name of an unknown ending, as a clause after the input."""
    foreign = foreign_name(name)
    return f"is {foreign}" if foreign else f"has an unknown ending; known are {KNOWN_ENDINGS}"


def _is_companion(name: str, directory: bool = False) -> bool:
    return name.startswith(".") or (not directory and _COMPANIONS.fullmatch(name) is not None)


def _find_local(inputs: list[Path]) -> tuple[list[InputFile], list[PassedOver]]:
    """Find the files among paths of this machine and below the directories among them."""
    paths: list[Path] = []
    passed_over: list[PassedOver] = []
    for entry in inputs:
        if os.path.isdir(entry):  # unlike Path.is_dir, it never raises
            for below in _entries_below(entry):
                if isinstance(below, Path):
                    paths.append(below)
                else:
                    passed_over.append(below)
            continue
        reason = _why_not_file(entry)
        if reason in ("broken link", "not a directory"):
            raise DataError(f"input {entry} does not exist; give a file or a directory of files")
        if reason is not None and format_of(entry.name) is None:
            raise DataError(f"input {entry} {_unknown(entry.name)}")
        if reason is not None:
            passed_over.append(PassedOver(str(entry), reason))
        else:
            paths.append(entry)
    # abspath, not resolve: the hub's cache is symlinks to files whose own names say nothing.
    parents = [os.path.abspath(entry if os.path.isdir(entry) else entry.parent) for entry in inputs]
    root = os.path.commonpath(parents or ["/"])
    files: list[InputFile] = []
    read_as: dict[tuple[int, int], str] = {}
    # Links come last: of a file and a link to it, the file is read.
    absolute = (Path(os.path.abspath(path)) for path in paths)
    for path in sorted(absolute, key=lambda path: (path.is_symlink(), path)):
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

    Links to directories are followed, and a directory reached twice is read once. Links wait until
    no real directories are left, so that a directory is read under its own name.
    """
    read_as: dict[tuple[int, int], str] = {}
    real = [root]
    links: list[Path] = []
    while real or links:
        directory = real.pop() if real else links.pop(0)
        name = directory.relative_to(root).as_posix()
        try:
            status = os.stat(directory)
            first = read_as.setdefault((status.st_dev, status.st_ino), name)
            if first != name:
                yield PassedOver(name, f"the same directory as {first}")
                continue
            children = sorted(os.listdir(directory))
        except OSError as error:
            yield PassedOver(name, (error.strerror or str(error)).lower())
            continue
        for child in children:
            path = directory / child
            is_directory = os.path.isdir(path)
            if _is_companion(child, is_directory):
                yield PassedOver(path.relative_to(root).as_posix(), COMPANION)
            elif is_directory:
                (links if os.path.islink(path) else real).append(path)
            elif (reason := _why_not_file(path)) is not None:
                yield PassedOver(path.relative_to(root).as_posix(), reason)
            else:
                yield path


def _why_not_file(path: Path) -> str | None:
    """Return why a file is not read, None if it is; without opening it, as a pipe never answers."""
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
    """Find objects: a URL names one, all below a prefix, or all that match a pattern.

    A web server has no listing, so every file of https:// must be named.
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
            f"inputs lie in several places ({' and '.join(sorted(places))}); tokenise each into a "
            f"directory of its own and train on a blend of them"
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
            elif entry.url == url and format_of(name) is None:
                raise DataError(f"input {url} {_unknown(name)}")
            else:
                passed_over.append(PassedOver(name, reason))
    return files, passed_over


def _names_object(url: str) -> bool:
    return not has_pattern(url) and format_of(url) is not None


def _root_of(url: str) -> str:
    """Return the prefix of a URL's objects: the URL, or the directory of an object or pattern."""
    if has_pattern(url) or _names_object(url):
        return re.split(r"[*?\[]", url)[0].rpartition("/")[0]
    return url.rstrip("/")


def _objects(url: str) -> list[RemoteObject]:
    scheme = scheme_of(url)
    if scheme in WEB or _names_object(url):
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
