"""The order of an epoch: permutations that are a function of a key, and their cache on disk."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.files import publish, temporary_path

Int64Array = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.integer]

# Part of the cache's name: to be raised when the same arguments come to mean another order, or other files.
_ORDER_VERSION = 2


@dataclass(frozen=True)
class Epoch:
    """The order of one epoch.

    documents: [documents], document numbers as the stream has them.
    ends: [documents + 1] int64, ends[i] is where document i of the stream begins; ends[-1] is its length.
    blocks: [blocks], block numbers in the order of the samples.
    """

    documents: IndexArray
    ends: Int64Array
    blocks: IndexArray


def permutation(count: int, *key: int | str) -> IndexArray:
    """A permutation of range(count) that depends on the key only; uint32 where that is enough.

    It sorts Philox's raw output, whose bits NumPy guarantees, unlike those of Generator.permutation.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    keys = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.uint32 if count <= 1 << 32 else np.int64)


class EpochCache:
    """Epochs as memory-mapped .npy files, which the processes of a machine, and runs on the same data, share.

    Args:
        directory: where the files go; it is made if it is missing.
        identity: everything the order depends on besides the epoch's number.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._identity = f"{_ORDER_VERSION} {identity}"

    def get(self, number: int, build: Callable[[], Epoch]) -> Epoch:
        """Epoch `number`, from the cache if it is there and whole; else `build`, and keep it.

        Of several processes that want the same epoch, one builds it and the others wait.

        Raises:
            DataError: the directory cannot be written.
        """
        key = hashlib.sha256(f"{self._identity} {number}".encode()).hexdigest()[:32]
        paths = [self._directory / f"{key}-{part}.npy" for part in ("documents", "ends", "blocks")]
        epoch = _load(paths)
        if epoch is None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                with open(self._directory / "lock", "wb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    epoch = _load(paths) or _store(paths, build())
            except OSError as error:
                raise DataError(
                    f"cannot write the sample cache in {self._directory}: {error.strerror or error}; "
                    "make room there, or check run.directory and data.cache_directory"
                ) from error
        return epoch


def _store(paths: list[Path], epoch: Epoch) -> Epoch:
    for path, array in zip(paths, (epoch.documents, epoch.ends, epoch.blocks), strict=True):
        temporary = temporary_path(path)
        try:
            with open(temporary, "wb") as stream:
                np.save(stream, array)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return _load(paths) or epoch


def _load(paths: list[Path]) -> Epoch | None:
    """The three files mapped, or None if one is missing or cut short."""
    try:
        documents, ends, blocks = (np.load(path, mmap_mode="r") for path in paths)
    except (OSError, ValueError):
        return None
    return Epoch(documents, ends, blocks) if len(ends) == len(documents) + 1 else None
