"""Which files are read: inputs, pieces of them, and the selection of a part of a large corpus."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from data_pipeline.errors import DataError
from data_pipeline.sources.remote import RemoteObject, is_url
from data_pipeline.sources.remote_survey import survey_remote
from data_pipeline.sources.survey import KNOWN_ENDINGS, PassedOver, describe, survey

_PLAIN_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class RecordKeys:
    """Where the text and the name of its source are in a record; a dot goes one object down.

    A record without the source key belongs to `default_source`.
    """

    text: str = "text"
    source: str = "meta.redpajama_set_name"
    default_source: str = "default"


def is_wanted(source: str, only: tuple[str, ...], never: tuple[str, ...]) -> bool:
    """Whether documents of a source are taken: of `only`, if there are any, and never of `never`."""
    return source not in never and (not only or source in only)


@dataclass(frozen=True)
class InputFile:
    """One input. `name` is its path below the inputs' common directory or prefix, wherever that lies.

    path: where it is: a file of this machine's, or an object of a store's.
    """

    path: Path | RemoteObject
    name: str
    size: int

    @property
    def version(self) -> str:
        """What its store calls this content; empty for a file, and where a store says nothing."""
        return self.path.version if isinstance(self.path, RemoteObject) else ""

    def open(self) -> BinaryIO:
        """Its bytes, unbuffered.

        Raises:
            OSError: the file cannot be opened.
            DataError: the object cannot be read, or is no longer what it was.
        """
        if isinstance(self.path, RemoteObject):
            return cast(BinaryIO, self.path.open())
        return cast(BinaryIO, open(self.path, "rb", buffering=0))

    def check_unchanged(self) -> None:
        """Is an object still what it was? A file's bytes are hashed when they are read, which says more.

        Raises:
            DataError: it is not.
        """
        if isinstance(self.path, RemoteObject):
            self.path.check_unchanged()

    @property
    def whole(self) -> Piece:
        """All of it."""
        return Piece(self, 0, self.size)


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of an input. Only a plain .jsonl is ever read in parts."""

    file: InputFile
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.end - self.start

    def __str__(self) -> str:
        """The file's path, with the byte range of a part."""
        if self.size == self.file.size:
            return str(self.file.path)
        return f"{self.file.path} (bytes {self.start}-{self.end})"


@dataclass(frozen=True)
class Inputs:
    """What is read, sorted by name, and every entry beside it that is not."""

    files: list[InputFile]
    passed_over: tuple[PassedOver, ...]


def find_inputs(inputs: Sequence[str | Path]) -> list[InputFile]:
    """The files of `find_all_inputs`."""
    return find_all_inputs(inputs).files


def find_all_inputs(inputs: Sequence[str | Path]) -> Inputs:
    """Files among `inputs` and below the directories or prefixes among them, and what there is besides.

    Raises:
        DataError: an input is missing, of an unknown format or given twice, or there is none at all; some are
            on this machine and some are not.
    """
    urls = [str(entry) for entry in inputs if is_url(entry)]
    if not urls:
        return _find_local([Path(entry) for entry in inputs])
    if len(urls) < len(inputs):
        raise DataError(
            f"{urls[0]} is not on this machine, but other inputs are; tokenise each into a directory of its "
            f"own and train on a blend of them"
        )
    found = survey_remote(urls)
    if not found.files:
        raise _nothing(urls, found.passed_over)
    for one, following in itertools.pairwise(found.files):
        if one.url == following.url:
            raise DataError(f"input {one} is given twice; name each object or prefix once")
    files = [InputFile(one, one.url.removeprefix(found.root), one.size) for one in found.files]
    return Inputs(sorted(files, key=lambda file: file.name), found.passed_over)


def _nothing(inputs: Sequence[object], passed_over: Sequence[PassedOver]) -> DataError:
    names, there = ", ".join(str(entry) for entry in inputs), "; ".join(describe(passed_over))
    return DataError(f"there is no {KNOWN_ENDINGS} file in {names}" + (f" ({there})" if there else ""))


def _find_local(inputs: list[Path]) -> Inputs:
    found = survey(inputs)
    if not found.files:
        raise _nothing(inputs, found.passed_over)
    # abspath, not resolve: the hub's cache is symlinks to files whose own names say nothing.
    absolute = sorted(Path(os.path.abspath(path)) for path in found.files)
    for path, following in itertools.pairwise(absolute):
        if path == following:
            raise DataError(f"input {path} is given twice; name each file or directory once")
    root = os.path.commonpath([os.path.abspath(e if e.is_dir() else e.parent) for e in inputs])
    files = [InputFile(path, path.relative_to(root).as_posix(), path.stat().st_size) for path in absolute]
    return Inputs(sorted(files, key=lambda file: file.name), found.passed_over)


def cut_into_pieces(file: InputFile, range_bytes: int) -> list[Piece]:
    """A plain .jsonl or .ndjson larger than `range_bytes` as ranges of so many bytes; others whole."""
    if not file.name.lower().endswith(_PLAIN_LINES) or file.size <= range_bytes:
        return [file.whole]
    starts = range(0, file.size, range_bytes)
    return [Piece(file, start, min(start + range_bytes, file.size)) for start in starts]


def parse_chunks(text: str) -> frozenset[int]:
    """`1,3-5` -> {1, 3, 4, 5}.

    Raises:
        DataError: not such a list.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise DataError(f"--chunks {text!r} is not a list like 1,3-5")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def chunk_of(name: str) -> int | None:
    """N of the directory `chunkN` in an input's name, as SlimPajama has it; None without one."""
    match = re.search(r"(?:^|/)chunk(\d+)/", name)
    return int(match[1]) if match else None


def select_chunks(files: list[InputFile], chunks: frozenset[int]) -> list[InputFile]:
    """The files of these chunks.

    Raises:
        DataError: a chunk has no file.
    """
    found = {chunk_of(file.name) for file in files}
    if missing := sorted(chunks - found):
        raise DataError(f"--chunks: no input lies in a directory chunk{missing[0]}/")
    return [file for file in files if chunk_of(file.name) in chunks]


def select_inputs(inputs: Sequence[str | Path], chunks: str) -> list[InputFile]:
    """The files of `select_all_inputs`."""
    return select_all_inputs(inputs, chunks).files


def select_all_inputs(inputs: Sequence[str | Path], chunks: str) -> Inputs:
    """`find_all_inputs`, with only the files of `chunks` (as `parse_chunks` reads it; empty for all).

    Raises:
        DataError: as these.
    """
    found = find_all_inputs(inputs)
    if not chunks:
        return found
    return Inputs(select_chunks(found.files, parse_chunks(chunks)), found.passed_over)
