"""Readers of shards: megatron-core's own to check them, and a bounded pool of maps to train."""

from __future__ import annotations

import logging
import struct
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.io.files import refusing
from data_pipeline.shards.manifest import Manifest, Shard, file_problem, verify_advice
from data_pipeline.shards.mapping import FileMap
from data_pipeline.shards.writing import read_lengths

# Maps need no descriptor, but the kernel allows a process 65,530 of them, and other libraries want
# some.
_MOST_OPEN = 1024


@dataclass(frozen=True)
class OpenShard:
    """Shard with its ids memory-mapped.

    Attributes:
        tokens: [tokens] ids of all documents one after the other, in the shard's own type.
        lengths: [documents] int64, tokens of each document, its end-of-document id included.
    """

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int64]


def open_shard(manifest: Manifest, shard: Shard) -> OpenShard:
    """Open one shard through megatron-core's IndexedDataset.

    Raises:
        DataError: If the shard is not as the manifest says.
    """
    read_indexed = _megatron_reader()
    prefix = manifest.prefix(shard)
    try:
        index = read_indexed(str(prefix)).index
        lengths = index.sequence_lengths.astype(np.int64)
        offsets = index.sequence_pointers // index.dtype_size
        offsets_agree = np.array_equal(offsets, np.cumsum(lengths) - lengths)
        # IndexedDataset unmaps its files when it is collected, under the arrays it gave out
        # (reading those is then a segmentation fault), so the ids are mapped again by an array that
        # owns its map.
        tokens = FileMap(Path(f"{prefix}.bin")).content.view(index.dtype)
    except OSError as error:
        raise DataError(f"cannot open {prefix}.bin/.idx: {error.strerror or error}") from error
    except (ValueError, OverflowError, AssertionError, IndexError, struct.error) as error:
        raise DataError(f"{prefix}.bin/.idx: megatron-core cannot read it ({error})") from error
    counts = f"{len(lengths):,} documents with {int(lengths.sum()):,} tokens"
    actual = f"{counts} of {index.dtype.__name__}"
    expected = f"{shard.documents:,} documents with {shard.tokens:,} tokens of {manifest.dtype}"
    if actual != expected or len(tokens) != shard.tokens or not offsets_agree:
        raise DataError(f"{prefix}.idx holds {actual}, the manifest says {expected}")
    return OpenShard(tokens, lengths)


def _megatron_reader() -> Any:
    """Import megatron-core's IndexedDataset without its warnings, even if Triton is missing.

    Shards need nothing else of what the import brings in. `megatron_patches.engine.compat` does the
    same for training, and says why.
    """
    stub = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    # Every name that is imported from the stub is None.
    vars(stub)["__getattr__"] = {}.get
    if without_triton := find_spec("triton") is None and stub.__name__ not in sys.modules:
        sys.modules[stub.__name__] = stub
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_no_missing_runtime)
    # Shards are read without ranks.
    warnings.filterwarnings("ignore", message="Could not determine rank")
    with warnings.catch_warnings():
        # On a machine without Apex and Transformer Engine, importing megatron.core says so four
        # times; its own DeprecationWarning would be an error under PYTHONWARNINGS=error.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    if without_triton:
        del sys.modules[stub.__name__]
    return IndexedDataset


def _is_no_missing_runtime(record: logging.LogRecord) -> bool:
    """Reject the message of a build of torch for GPUs that it finds no runtime."""
    return "runtime is found" not in record.getMessage()


def lengths_of(manifest: Manifest, shard: Shard) -> npt.NDArray[np.int32]:
    """Read the lengths of documents in tokens, [documents] int32, from the .idx alone.

    Raises:
        DataError: If the counts are not as the manifest says.
    """
    prefix = manifest.prefix(shard)
    lengths = read_lengths(prefix)
    if (len(lengths), int(lengths.sum(dtype=np.int64))) != (shard.documents, shard.tokens):
        raise DataError(f"{prefix}.idx is not as the manifest says; see verify")
    return lengths


class ShardPool:
    """Pool of shards that maps each on first read and closes the least recently used.

    Threads may share a pool. An array stays valid after its shard was closed.

    Args:
        shards: Shards by number.
        most_open: Number of shards mapped at a time.
    """

    def __init__(
        self, manifest: Manifest, shards: Sequence[Shard], most_open: int = _MOST_OPEN
    ) -> None:
        self._manifest = manifest
        self._shards = shards
        self._most_open = most_open
        self._dtype = np.dtype(manifest.dtype)
        self._open: OrderedDict[int, FileMap] = OrderedDict()
        self._lock = threading.Lock()

    def tokens(self, number: int) -> npt.NDArray[np.integer]:
        """Return the ids [tokens] of a shard; DataError if its .bin has another length."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                self._open[number] = self._map(self._shards[number])
                if len(self._open) > self._most_open:
                    self._open.popitem(last=False)
            return self._open[number].content.view(self._dtype)

    def forget_pages(self, numbers: set[int]) -> None:
        """Drop the pages read of these shards from this process's memory."""
        with self._lock:
            maps = [self._open[number] for number in numbers if number in self._open]
        for file_map in maps:
            file_map.forget_pages()

    def _map(self, shard: Shard) -> FileMap:
        path = Path(f"{self._manifest.prefix(shard)}.bin")
        if problem := file_problem(path, shard.bin_bytes, None):
            raise DataError(f"{problem}; {verify_advice(self._manifest.directory)}")
        with refusing(f"open {path}"):
            opened = FileMap(path)
        opened.expect_random_access()
        return opened
