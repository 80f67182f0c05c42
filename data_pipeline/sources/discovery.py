"""Inputs of the pipeline: files, pieces of files, and the selection of a part of a large corpus."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from data_pipeline.errors import DataError
from data_pipeline.sources.remote import RemoteObject, is_url
from data_pipeline.sources.survey import KNOWN_ENDINGS, PassedOver, describe, survey

_PLAIN_LINES = (".jsonl", ".ndjson")


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
        """Open the bytes, unbuffered.

        Raises:
            OSError: the file cannot be opened.
            DataError: the object cannot be read, or has changed.
        """
        if isinstance(self.path, RemoteObject):
            return cast(BinaryIO, self.path.open())
        return cast(BinaryIO, open(self.path, "rb", buffering=0))

    def check_unchanged(self) -> None:
        """Check that an object has not changed. (A file's bytes are hashed when they are read.)

        Raises:
            DataError: the object has changed.
        """
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
class Inputs:
    """Input files, sorted by name, and every entry beside them that is not read."""

    files: list[InputFile]
    passed_over: tuple[PassedOver, ...]


def find_inputs(inputs: Sequence[str | Path]) -> list[InputFile]:
    """Return the files of `find_all_inputs`."""
    return find_all_inputs(inputs).files


def find_all_inputs(inputs: Sequence[str | Path]) -> Inputs:
    """Find the files among `inputs` and below the directories or prefixes, and the entries that are not read.

    Raises:
        DataError: as `survey`; or an input is given twice, or there is none at all.
    """
    surveyed = survey(inputs)
    if not surveyed.files:
        names, there = ", ".join(map(str, inputs)), "; ".join(describe(surveyed.passed_over))
        raise DataError(f"there is no {KNOWN_ENDINGS} file in {names}" + (f" ({there})" if there else ""))
    for path, following in itertools.pairwise(surveyed.files):
        if str(path) == str(following):
            kinds = "object or prefix" if is_url(path) else "file or directory"
            raise DataError(f"input {path} is given twice; name each {kinds} once")
    files = []
    for path in surveyed.files:
        size = path.stat().st_size if isinstance(path, Path) else path.size
        files.append(InputFile(path, str(path).removeprefix(surveyed.root), size))
    return Inputs(sorted(files, key=lambda file: file.name), surveyed.passed_over)


def cut_into_pieces(file: InputFile, range_bytes: int) -> list[Piece]:
    """Cut a plain .jsonl or .ndjson larger than `range_bytes` into ranges of that size."""
    if not file.name.lower().endswith(_PLAIN_LINES) or file.size <= range_bytes:
        return [file.whole]
    starts = range(0, file.size, range_bytes)
    return [Piece(file, start, min(start + range_bytes, file.size)) for start in starts]


def parse_chunks(text: str) -> frozenset[int]:
    """Read a list of chunks: `1,3-5` -> {1, 3, 4, 5}.

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
    """Return N of the directory `chunkN` in an input's name, as SlimPajama has it; None without one."""
    match = re.search(r"(?:^|/)chunk(\d+)/", name)
    return int(match[1]) if match else None


def select_chunks(files: list[InputFile], chunks: frozenset[int]) -> list[InputFile]:
    """Return the files of these chunks.

    Raises:
        DataError: a chunk has no file.
    """
    if missing := sorted(chunks - {chunk_of(file.name) for file in files}):
        raise DataError(f"--chunks: no input lies in a directory chunk{missing[0]}/")
    return [file for file in files if chunk_of(file.name) in chunks]


def select_all_inputs(inputs: Sequence[str | Path], chunks: str) -> Inputs:
    """Find inputs as `find_all_inputs`, with only the files of `chunks` (as for `parse_chunks`; empty: all).

    Raises:
        DataError: as `find_all_inputs`, `parse_chunks` and `select_chunks`.
    """
    everything = find_all_inputs(inputs)
    if not chunks:
        return everything
    return Inputs(select_chunks(everything.files, parse_chunks(chunks)), everything.passed_over)
