"""Order of an epoch: permutations that are a function of a key, and their cache on disk."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    Draft,
    open_regular,
    read_checked_json,
    to_checked_json,
    write_atomically,
)
from data_pipeline.io.lease import Lease
from data_pipeline.shards.mapping import FileMap

Int64Array = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.integer]

Layout = Mapping[str, tuple[np.dtype[Any], int]]
"""Arrays of an order by name: the type and the length of each."""

AT_ONCE = 4_000_000
"""Numbers of a permutation that are sorted at a time, at some 40 bytes each."""
HELD = 1 << 26
"""Numbers whose random words are held at a time, at some 24 bytes each."""
_MOST_DRAWINGS = 8
"""Most passes over all random words; beyond, each pass holds more, so that time stays linear."""
_DRAWN = 1 << 16  # random words at a time: they stay in a core's cache

# Part of the cached files' names; raise it when the same arguments come to mean another order or
# other files.
_ORDER_VERSION = 3
# A process that takes longer than this to make an order counts as stuck.
_WAIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Epoch:
    """Order of one epoch.

    Attributes:
        documents: [documents] document numbers in the order of the stream.
        ends: [documents + 1] int64, position of each document's first id in the stream, and the
            stream's length.
        blocks: [blocks] block numbers in the order of the samples.
    """

    documents: IndexArray
    ends: Int64Array
    blocks: IndexArray


def permutation(count: int, *key: int | str) -> Iterator[IndexArray]:
    """Yield, piece by piece, a permutation of range(count) that depends on the key only.

    The numbers are sorted by Philox's raw words, whose bits NumPy guarantees, unlike those of
    Generator.permutation. For more than `HELD` numbers, all words are drawn once for each range of
    values, and only those in the range are kept; about `AT_ONCE` of them are sorted at a time.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    drawings = min(_MOST_DRAWINGS, -(-count // HELD))
    for low, high in _ranges(0, 1 << 64, drawings):
        words, numbers = _draw_words(count, digest, low, high)
        for first, end in _ranges(low, high, 1 + len(words) // AT_ONCE):
            kept = _indices_within(words, first, end)
            if len(kept):
                yield numbers[kept][np.argsort(words[kept], kind="stable")]


def _ranges(low: int, high: int, parts: int) -> Iterator[tuple[int, int]]:
    """Split the words from `low` to below `high` into equal ranges."""
    bounds = [low + (high - low) * part // parts for part in range(parts + 1)]
    yield from pairwise(bounds)


def _indices_within(words: npt.NDArray[np.uint64], low: int, high: int) -> Int64Array:
    """Return the indices of the words from `low` to below `high`, in order."""
    return np.flatnonzero((words >= np.uint64(low)) & (words <= np.uint64(high - 1)))


def _draw_words(
    count: int, digest: bytes, low: int, high: int
) -> tuple[npt.NDArray[np.uint64], IndexArray]:
    """Draw `count` words; return those from `low` to below `high` with their numbers."""
    philox = np.random.Philox(key=int.from_bytes(digest, "little"))
    words, numbers = [], []
    for start in range(0, count, _DRAWN):
        drawn = philox.random_raw(min(_DRAWN, count - start))
        kept = _indices_within(drawn, low, high)
        words.append(drawn[kept])
        numbers.append((start + kept).astype(index_type(count)))
    return np.concatenate(words), np.concatenate(numbers)


def index_type(count: int) -> np.dtype[Any]:
    """Return the type for numbers below `count`: uint32 if that is enough."""
    return np.dtype(np.uint32 if count <= 1 << 32 else np.int64)


def collect(layout: Layout, pieces: Iterable[tuple[str, IndexArray]]) -> list[IndexArray]:
    """Assemble the arrays of a layout in memory.

    Args:
        pieces: (name of the array, piece), the pieces of one array in order.
    """
    arrays = {name: np.empty(length, dtype) for name, (dtype, length) in layout.items()}
    filled = dict.fromkeys(layout, 0)
    for name, piece in pieces:
        arrays[name][filled[name] : filled[name] + len(piece)] = piece
        filled[name] += len(piece)
    return list(arrays.values())


class ArrayCache:
    """Cache of arrays as memory-mapped .npy files, shared by processes of a machine and by runs.

    A .json beside the files, written last, states their sizes and checksums. Files that differ from
    that statement are made again.

    Args:
        identity: Everything that the arrays depend on besides their key.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._identity = f"{_ORDER_VERSION} {identity}"

    def get(
        self, key: str, layout: Layout, build: Callable[[], Iterable[tuple[str, IndexArray]]]
    ) -> list[IndexArray]:
        """Return the arrays of a key from the cache, after building them if missing or damaged.

        Of several processes that want the same arrays, one builds them and the others wait, for
        half an hour at most.

        Args:
            build: Callback that yields the pieces, as in `collect`.

        Raises:
            DataError: If the directory cannot be written.
        """
        digest = hashlib.sha256(f"{self._identity} {key}".encode()).hexdigest()[:32]
        paths = [self._directory / f"{digest}-{name}.npy" for name in layout]
        note = self._directory / f"{digest}.json"
        try:
            arrays = _load(paths, note)
            if arrays is None:
                lock = self._directory / f"{digest}.lock"
                with Lease(lock, "making an order of samples", _WAIT_SECONDS):
                    # The process that held the lock before may have built the arrays.
                    arrays = _load(paths, note) or _store(paths, note, layout, build())
        except OSError as error:
            raise DataError(
                f"cannot write the sample cache in {self._directory}: {error.strerror or error}; "
                "make room there, or check run.directory and data.cache_directory"
            ) from error
        return arrays


def _store(
    paths: list[Path], note: Path, layout: Layout, pieces: Iterable[tuple[str, IndexArray]]
) -> list[IndexArray]:
    # The note vouches for the files, so it goes before they change.
    note.unlink(missing_ok=True)
    with ExitStack() as drafts:
        streams = {
            name: drafts.enter_context(Draft(path))
            for name, path in zip(layout, paths, strict=True)
        }
        for name, (dtype, length) in layout.items():
            header = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(streams[name], header)
        for name, piece in pieces:
            # np.save would hide the reason of an error.
            streams[name].write(piece.astype(layout[name][0], copy=False).data)
    write_atomically(note, to_checked_json({"files": _states(paths)}))
    return [_map(path) for path in paths]


def _load(paths: list[Path], note: Path) -> list[IndexArray] | None:
    """Map the files; return None if one is missing or differs from the note."""
    try:
        stated = read_checked_json(note, "delete it").get("files") if note.is_file() else []
        return [_map(path) for path in paths] if stated == _states(paths) else None
    except (FileNotFoundError, ValueError):  # a damaged note is a DataError, so a ValueError
        return None


def _states(paths: list[Path]) -> list[dict[str, Any]]:
    return [{"name": p.name, "size": p.stat().st_size, "crc32": _crc32(p)} for p in paths]


def _map(path: Path) -> IndexArray:
    with open_regular(path) as stream:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        start = stream.tell()
    array: IndexArray = FileMap(path).content[start:].view(dtype)
    return array.reshape(shape)


def _crc32(path: Path) -> int:
    checksum = 0
    with open_regular(path) as stream:
        while chunk := stream.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
