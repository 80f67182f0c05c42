"""Shards through megatron-core's own reader: the one place here that leans on megatron-core (0.16.1)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest, Shard

if TYPE_CHECKING:  # the import costs seconds and warns; open_shard does it when it is needed
    from megatron.core.datasets.indexed_dataset import IndexedDataset


@dataclass(frozen=True)
class OpenShard:
    """A memory-mapped shard. Copy what should outlive this object: its end unmaps the files under the arrays.

    tokens: [tokens], the ids of all documents one after the other, in the shard's own type; not copied.
    lengths: [documents] int32, tokens of each document, its end-of-document id included.
    """

    path: Path
    dataset: (
        IndexedDataset  # megatron-core's reader closes its memory maps when it is collected, so it is kept
    )
    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int32]


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
        dataset = IndexedDataset(str(prefix))
        index = dataset.index
        tokens = dataset.bin_reader.read(index.dtype, shard.tokens, 0)
        lengths = index.sequence_lengths
    except (OSError, ValueError, AssertionError, IndexError) as error:
        raise DataError(
            f"{prefix}.bin/.idx: megatron-core cannot read it ({error}); tokenise again"
        ) from error
    if (index.dtype.__name__, len(lengths), int(lengths.sum(dtype=np.int64))) != (
        manifest.dtype,
        shard.documents,
        shard.tokens,
    ):
        raise DataError(
            f"{prefix}.idx holds {len(lengths):,} documents of {index.dtype.__name__} where the manifest "
            f"says {shard.documents:,} with {shard.tokens:,} tokens of {manifest.dtype}; tokenise again"
        )
    return OpenShard(prefix, dataset, tokens, lengths)
