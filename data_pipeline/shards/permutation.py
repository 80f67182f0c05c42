"""Order of an epoch: permutations that are a function of a key, and their cache on disk."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.io.files import Draft, read_checked_json, to_checked_json, write_atomically
from data_pipeline.io.lease import Lease
from data_pipeline.shards.mapping import FileMap

Int64Array = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.integer]

# Part of the cache's name: to be raised when the same arguments come to mean another order, or other files.
_ORDER_VERSION = 3
# An order of 100 billion tokens takes a minute or two; whoever takes longer than this is stuck.
_WAIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Epoch:
    """Order of one epoch.

    documents: [documents], document numbers in the order of the stream.
    ends: [documents + 1] int64, place of each document's first id in the stream, and the stream's length.
    blocks: [blocks], block numbers in the order of the samples.
    """

    documents: IndexArray
    ends: Int64Array
    blocks: IndexArray


def permutation(count: int, *key: int | str) -> IndexArray:
    """Return a permutation of range(count) that depends on the key only; uint32 where that is enough.

    Philox's raw output is sorted, whose bits NumPy guarantees, unlike those of Generator.permutation.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    keys = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.uint32 if count <= 1 << 32 else np.int64)


class ArrayCache:
    """Cache of arrays as memory-mapped .npy files, shared by the processes of a machine and by runs.

    Beside the files a .json states their sizes and checksums; it is written last. Files that differ from that
    statement are made again. `identity` is everything the arrays depend on besides their key.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._identity = f"{_ORDER_VERSION} {identity}"

    def get(
        self, key: str, names: Sequence[str], build: Callable[[], Sequence[IndexArray]]
    ) -> list[IndexArray]:
        """Return the arrays of `key`, from the cache if they are there and whole, else made now and kept.

        Of several processes that want the same arrays, one builds them and the others wait, for half an hour
        at most. DataError: the directory cannot be written.
        """
        digest = hashlib.sha256(f"{self._identity} {key}".encode()).hexdigest()[:32]
        paths = [self._directory / f"{digest}-{name}.npy" for name in names]
        note = self._directory / f"{digest}.json"
        try:
            arrays = _load(paths, note)
            if arrays is None:
                with Lease(self._directory / f"{digest}.lock", "making an order of samples", _WAIT_SECONDS):
                    arrays = _load(paths, note) or _store(paths, note, build())
        except OSError as error:
            raise DataError(
                f"cannot write the sample cache in {self._directory}: {error.strerror or error}; "
                "make room there, or check run.directory and data.cache_directory"
            ) from error
        return arrays


def _store(paths: list[Path], note: Path, arrays: Sequence[IndexArray]) -> list[IndexArray]:
    note.unlink(missing_ok=True)
    stated = []
    for path, array in zip(paths, arrays, strict=True):
        with Draft(path) as stream:
            np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
            stream.write(np.ascontiguousarray(array).data)  # np.save's error would not say why
        stated.append({"name": path.name, "size": path.stat().st_size, "crc32": _crc32(path)})
    write_atomically(note, to_checked_json({"files": stated}))
    return _load(paths, note) or list(arrays)


def _load(paths: list[Path], note: Path) -> list[IndexArray] | None:
    """Map the files; None if one is missing or differs from the note."""
    try:
        stated = read_checked_json(note, "delete it")["files"] if note.is_file() else []
        actual = [{"name": p.name, "size": p.stat().st_size, "crc32": _crc32(p)} for p in paths]
        return [_map(path) for path in paths] if stated == actual else None
    except (DataError, KeyError, FileNotFoundError, ValueError):
        return None


def _map(path: Path) -> IndexArray:
    with open(path, "rb") as stream:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        start = stream.tell()
    array: IndexArray = FileMap(path).content[start:].view(dtype)
    return array.reshape(shape)


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
