"""Catalogue of the corpora that `download` knows, and the choice of a part of their files."""

from __future__ import annotations

import fnmatch
import hashlib
from collections import defaultdict
from dataclasses import dataclass

from data_pipeline.errors import DataError
from data_pipeline.sources.discovery import chunk_of
from data_pipeline.sources.origin import RemoteFile


@dataclass(frozen=True)
class HubSource:
    """Corpus on the hub. `patterns` are those of fnmatch, where * goes over / too."""

    repository: str
    patterns: tuple[str, ...]


SOURCES = {
    "slimpajama": HubSource("cerebras/SlimPajama-627B", ("{split}/*.jsonl.zst",)),
    "openwebtext": HubSource("Skylion007/openwebtext", ("*{split}*.parquet",)),
    "tinystories": HubSource("roneneldan/TinyStories", ("data/{split}-*.parquet",)),
}


@dataclass(frozen=True)
class Wanted:
    """Choice of a repository's files.

    include: patterns in place of the source's own; chunks: only these of SlimPajama's, all if empty.
    fraction: share of the files of every directory, chosen by the hash of their names.
    """

    splits: tuple[str, ...] = ("train",)
    include: tuple[str, ...] = ()
    chunks: frozenset[int] = frozenset()
    fraction: float = 1.0

    def choose(self, files: list[RemoteFile], source: HubSource, where: str) -> list[RemoteFile]:
        """Return the wanted files, sorted by name.

        Raises:
            DataError: a pattern matches nothing, a chunk is missing, or the fraction is impossible.
        """
        if not 0 < self.fraction <= 1:
            raise DataError(f"--fraction {self.fraction} must be above 0 and at most 1")
        patterns = self.include or tuple(
            pattern.format(split=split) for pattern in source.patterns for split in self.splits
        )
        chosen: dict[str, RemoteFile] = {}
        for pattern in patterns:
            matching = {file.name: file for file in files if fnmatch.fnmatchcase(file.name, pattern)}
            if not matching:
                raise DataError(
                    f"{where} has no file that matches {pattern}; give --include or another --splits"
                )
            chosen |= matching
        if self.chunks:
            if missing := sorted(self.chunks - {chunk_of(name) for name in chosen}):
                raise DataError(f"{where} has no chunk{missing[0]}; see --chunks")
            chosen = {name: file for name, file in chosen.items() if chunk_of(name) in self.chunks}
        by_directory: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(chosen, key=lambda name: hashlib.sha256(name.encode()).digest()):
            by_directory[name.rpartition("/")[0]].append(name)
        names = [
            n for group in by_directory.values() for n in group[: -int(-len(group) * self.fraction // 1)]
        ]
        return [chosen[name] for name in sorted(names)]
