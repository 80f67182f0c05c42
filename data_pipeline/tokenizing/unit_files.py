"""Files with the ids of one unit each, until the ids are in shards.

A unit has one file, however many splits and sources it has. The file holds all ids in the order in
which they were encoded, batch after batch; within a batch, the documents of one group (a split and
source) are together. Then follow, sorted by group, the length of every document (int32), and every
run of ids (first id and number of ids, int64).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.files import Draft
from data_pipeline.io.forms import Count
from data_pipeline.shards.manifest import Split
from data_pipeline.shards.writing import ShardWriter, pack
from data_pipeline.tokenizer.encoder import Encoded

Group = tuple[str, str]
_CHUNK_TOKENS = 1 << 21


@dataclass
class _Content:
    """Content of a group so far."""

    text_bytes: int = 0
    crc32: int = 0
    lengths: list[npt.NDArray[np.int32]] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)


class UnitData:
    """Writer of a unit's file, under a temporary name until `finish`.

    Memory: four bytes a document.

    Args:
        dtype: Type of the ids, from `dtype_for`.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._groups: dict[Group, _Content] = {}
        self._tokens = 0
        self._draft = Draft(path)
        self._stream = self._draft.stream

    def add(self, encoded: Encoded, groups: Iterable[tuple[Group, int, int]]) -> None:
        """Append documents in one write; DataError if an id does not fit the type.

        Args:
            encoded: Documents, those of one group together.
            groups: (group, documents, bytes of text) of every group, in order.
        """
        ids = pack(encoded.ids, self._dtype)
        self._stream.write(ids.data)
        document = first = 0
        for group, documents, text_bytes in groups:
            lengths = encoded.lengths[document : document + documents]
            count = int(lengths.sum(dtype=np.int64))
            content = self._groups.setdefault(group, _Content())
            content.text_bytes += text_bytes
            content.crc32 = zlib.crc32(ids[first : first + count].data, content.crc32)
            content.lengths.append(lengths)
            content.runs.append((self._tokens + first, count))
            document += documents
            first += count
        self._tokens += len(ids)

    def finish(self) -> list[dict[str, Any]]:
        """Publish the file; return its groups, sorted, as the unit's record states them."""
        stated: list[dict[str, Any]] = []
        groups = sorted(self._groups.items())
        for (split, source), content in groups:
            lengths = np.concatenate(content.lengths)
            self._stream.write(lengths.astype("<i4").data)
            stated.append(
                {
                    "split": split,
                    "source": source,
                    "documents": len(lengths),
                    "tokens": int(lengths.sum(dtype=np.int64)),
                    "text_bytes": content.text_bytes,
                    "runs": len(content.runs),
                    "crc32": zlib.crc32(lengths.data, content.crc32),
                }
            )
        for _, content in groups:
            self._stream.write(np.array(content.runs, dtype="<i8").data)
        self._draft.publish()
        return stated

    def discard(self) -> None:
        """Remove an unfinished file; do nothing after `finish`."""
        self._draft.discard()


class StatedGroup(TypedDict):
    """Group of a finished unit, as the unit's record states it."""

    split: Split
    source: str
    documents: Count
    tokens: Count
    text_bytes: Count
    runs: Count
    crc32: Count


@dataclass(frozen=True)
class UnitGroup:
    """Group of a finished unit.

    Attributes:
        unit: Number of the unit.
        path: Path of the unit's file.
        documents: Number of documents.
        tokens: Number of ids, end-of-document ids included.
        text_bytes: Bytes of text, as UTF-8.
        runs: Number of runs of ids.
        crc32: Checksum of ids and lengths.
        lengths_at: Offset of the lengths in the file, in bytes.
        runs_at: Offset of the runs in the file, in bytes.
    """

    unit: int
    path: Path
    documents: int
    tokens: int
    text_bytes: int
    runs: int
    crc32: int
    lengths_at: int
    runs_at: int


def unit_groups(record: dict[str, Any], path: Path, dtype: str) -> dict[Group, UnitGroup]:
    """Return the groups of a unit by split and source."""
    groups = record["groups"]
    lengths_at = sum(group["tokens"] for group in groups) * np.dtype(dtype).itemsize
    runs_at = lengths_at + 4 * sum(group["documents"] for group in groups)
    by_group: dict[Group, UnitGroup] = {}
    for group in groups:
        values = {key: value for key, value in group.items() if key not in ("split", "source")}
        by_group[group["split"], group["source"]] = UnitGroup(
            record["unit"], path, **values, lengths_at=lengths_at, runs_at=runs_at
        )
        lengths_at += 4 * group["documents"]
        runs_at += 16 * group["runs"]
    return by_group


def data_size(record: dict[str, Any], dtype: str) -> int:
    """Return the size in bytes that the unit's file should have."""
    return sum(
        group["tokens"] * np.dtype(dtype).itemsize + 4 * group["documents"] + 16 * group["runs"]
        for group in record["groups"]
    )


def copy_group(group: UnitGroup, writer: ShardWriter) -> None:
    """Append a group's documents to a shard.

    Raises:
        DataError: If the unit's file is not what was written.
    """
    damaged = DataError(
        f"{group.path} is damaged: its content does not have the checksum of its record; delete "
        f"it and run the same tokenize command again"
    )
    crc32 = 0
    with open(group.path, "rb") as stream:
        stream.seek(group.lengths_at)
        lengths = np.fromfile(stream, "<i4", group.documents)
        stream.seek(group.runs_at)
        runs = np.fromfile(stream, "<i8", 2 * group.runs).reshape(-1, 2)
        # Cheap checks first: a damaged run must not make the copy read gigabytes.
        if len(lengths) != group.documents or runs[:, 1].sum() != group.tokens or (runs < 0).any():
            raise damaged
        for ids in _read_runs(stream, runs.tolist(), writer.dtype):
            crc32 = zlib.crc32(ids.data, crc32)
            writer.append_ids(ids)
    if zlib.crc32(lengths.data, crc32) != group.crc32:
        raise damaged
    writer.append_lengths(lengths)


def _read_runs(
    stream: BinaryIO, runs: list[list[int]], dtype: np.dtype[Any]
) -> Iterator[npt.NDArray[np.integer]]:
    """Read the ids of runs, a few MB at a time; adjacent runs are read together."""
    joined: list[list[int]] = []
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1][1] += count
        else:
            joined.append([first, count])
    for first, count in joined:
        stream.seek(first * dtype.itemsize)
        for start in range(0, count, _CHUNK_TOKENS):
            yield np.fromfile(stream, dtype, min(_CHUNK_TOKENS, count - start))
