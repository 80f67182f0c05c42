"""Shards through megatron-core's own reader: the one place here that leans on megatron-core (0.16.1)."""

from __future__ import annotations

import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest, Shard


@dataclass(frozen=True)
class OpenShard:
    """A shard, its ids memory-mapped.

    tokens: [tokens], the ids of all documents one after the other, in the shard's own type.
    lengths: [documents] int64, tokens of each document, its end-of-document id included.
    mapping: the map behind `tokens`.
    """

    path: Path
    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int64]
    mapping: mmap.mmap

    def expect_random_access(self) -> None:
        """Tell the kernel that reading ahead does not pay: what follows a sample is not the next sample."""
        self.mapping.madvise(mmap.MADV_RANDOM)

    def forget_pages(self) -> None:
        """Take the pages read so far out of this process's memory; the kernel's page cache keeps them."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


def open_shard(manifest: Manifest, shard: Shard) -> OpenShard:
    """Open one shard through `megatron.core.datasets.indexed_dataset.IndexedDataset`.

    Raises:
        DataError: megatron-core cannot read it, or it holds something else than the manifest says.
    """
    with warnings.catch_warnings():
        # On a machine without Apex and Transformer Engine, importing megatron.core says so four times.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    prefix = manifest.prefix(shard)
    try:
        index = IndexedDataset(str(prefix)).index
        lengths = index.sequence_lengths.astype(np.int64)
        offsets_agree = np.array_equal(
            index.sequence_pointers // index.dtype_size, np.cumsum(lengths) - lengths
        )
        # IndexedDataset unmaps its files when it is collected, under the arrays it gave out (reading those is
        # then a segmentation fault), so the ids are mapped again by an array that owns its map.
        with open(f"{prefix}.bin", "rb") as stream:
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        tokens = np.frombuffer(mapping, dtype=index.dtype)
    except (OSError, ValueError, AssertionError, IndexError) as error:
        raise DataError(
            f"{prefix}.bin/.idx: megatron-core cannot read it ({error}); tokenise again"
        ) from error
    found = f"{len(lengths):,} documents with {int(lengths.sum()):,} tokens of {index.dtype.__name__}"
    expected = f"{shard.documents:,} documents with {shard.tokens:,} tokens of {manifest.dtype}"
    if found != expected or len(tokens) != shard.tokens or not offsets_agree:
        raise DataError(f"{prefix}.idx holds {found}, the manifest says {expected}; tokenise again")
    return OpenShard(prefix, tokens, lengths, mapping)
