"""Every entry below the inputs: what is read, and of everything else the name and why it is not."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError

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
    """An entry that is not read. `reason` is COMPANION for what nobody expects to be read."""

    name: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """Files to read, and the entries that are not read, both sorted."""

    files: tuple[Path, ...]
    passed_over: tuple[PassedOver, ...]


def survey(inputs: list[Path]) -> Survey:
    """Files among `inputs` and everything below the directories among them.

    Directories that are symbolic links are followed; one that is reached twice is read once.

    Raises:
        DataError: an input is missing, no regular file, or of an unknown ending.
    """
    files: list[Path] = []
    passed_over: list[PassedOver] = []
    for entry in inputs:
        if entry.is_dir():
            for found in _Walk(entry).entries():
                if isinstance(found, PassedOver):
                    passed_over.append(found)
                else:
                    files.append(found)
            continue
        reason = _why_not(entry)
        if reason == "broken link" or not entry.exists():
            raise DataError(f"input {entry} does not exist; give a file or a directory of files")
        if reason == "unknown ending":
            raise DataError(f"input {entry} has an unknown ending; known are {KNOWN_ENDINGS}")
        if reason is not None:
            passed_over.append(PassedOver(str(entry), reason))
        else:
            files.append(entry)
    return Survey(tuple(files), tuple(sorted(passed_over, key=lambda one: one.name)))


def unread(passed_over: Iterable[PassedOver]) -> list[PassedOver]:
    """Those that somebody may have meant to be read."""
    return [entry for entry in passed_over if entry.reason != COMPANION]


def companions(passed_over: Iterable[PassedOver]) -> list[PassedOver]:
    """Those that nobody expects to be read."""
    return [entry for entry in passed_over if entry.reason == COMPANION]


def describe(passed_over: Iterable[PassedOver], at_most: int = 5) -> list[str]:
    """Lines for the console: entries by reason, with the first names."""
    entries = list(passed_over)
    lines = []
    for reason, count in sorted(Counter(entry.reason for entry in entries).items()):
        names = [entry.name for entry in entries if entry.reason == reason]
        rest = f" and {count - at_most:,} more" if count > at_most else ""
        title = "left out" if reason == COMPANION else f"not read ({reason})"
        lines.append(f"{title}: {', '.join(names[:at_most])}{rest}")
    return lines


class _Walk:
    """One directory's tree. Real directories come before links, so that a link never takes their place."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read_as: dict[tuple[int, int], str] = {}

    def entries(self) -> Iterator[Path | PassedOver]:
        links = yield from self._below(self._root)
        while links:
            linked = links.pop(0)
            links += yield from self._below(linked)

    def _below(self, directory: Path) -> Generator[Path | PassedOver, None, list[Path]]:
        """What is in a directory and the real directories below it; returns the links to directories."""
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
                    found = sorted(scanned, key=lambda entry: entry.name)
            except OSError as error:
                yield PassedOver(name, (error.strerror or str(error)).lower())
                continue
            for entry in found:
                path = place / entry.name
                if is_companion(entry.name):
                    yield PassedOver(path.relative_to(self._root).as_posix(), COMPANION)
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif entry.is_dir():
                    links.append(path)
                elif (reason := _why_not(path)) is not None:
                    yield PassedOver(path.relative_to(self._root).as_posix(), reason)
                else:
                    yield path
        return links


def is_companion(name: str) -> bool:
    return name.startswith(".") or _COMPANIONS.fullmatch(name) is not None


def _why_not(path: Path) -> str | None:
    """Why a file is not read; None if it is. Nothing is opened: a pipe would never answer."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "broken link"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        return kinds.get(stat.S_IFMT(status.st_mode), "a device")
    if not path.name.lower().endswith(SUFFIXES):
        return "unknown ending"
    return "empty" if status.st_size == 0 else None
