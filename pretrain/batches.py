"""Which samples of a global batch are this rank's, and their tokens.

A global batch is the samples `consumed_samples …` of one order over the whole run, dealt out in rounds of
micro_batch_size × data-parallel size. Tensor-parallel ranks read the same samples; nothing is broadcast.
"""

from __future__ import annotations

import numpy as np
import torch

from data_pipeline.loader import Loader
from data_pipeline.order import Int64Array
from pretrain.config import Config
from pretrain.data import RunData
from pretrain.distributed import ParallelContext

BATCHES_AHEAD = 2


def rank_samples(
    consumed_samples: int,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Int64Array:
    """`[micro batches, micro_batch_size]` sample numbers of one data-parallel rank in one global batch."""
    numbers = np.arange(consumed_samples, consumed_samples + global_batch_size, dtype=np.int64)
    return numbers.reshape(-1, data_parallel_size, micro_batch_size)[:, data_parallel_rank]


class Batches:
    """This rank's part of every global batch, read ahead by `data.loader_workers` threads."""

    def __init__(self, config: Config, context: ParallelContext, data: RunData) -> None:
        self._config = config
        self._context = context
        self._loader = Loader(data.samples, config.data.loader_workers)

    def at(self, consumed_samples: int) -> torch.Tensor:
        """`[micro batches, micro_batch_size, sequence_length + 1]` ids of the batch from there on (CPU).

        Raises:
            DataError: a shard or the order of a new epoch could not be read.
        """
        size, total = self._config.data.global_batch_size, self._config.total_steps
        starts = range(consumed_samples, consumed_samples + (BATCHES_AHEAD + 1) * size, size)
        now, *later = (
            self._numbers(start) for start in starts if start < max(total * size, consumed_samples + 1)
        )
        blocks = self._loader.blocks(now.ravel(), [numbers.ravel() for numbers in later])
        return torch.from_numpy(blocks).view(*now.shape, -1)

    def close(self) -> None:
        """Stop reading ahead."""
        self._loader.close()

    def _numbers(self, consumed_samples: int) -> Int64Array:
        return rank_samples(
            consumed_samples,
            global_batch_size=self._config.data.global_batch_size,
            micro_batch_size=self._config.data.micro_batch_size,
            data_parallel_rank=self._context.data_parallel_rank,
            data_parallel_size=self._context.data_parallel_size,
        )
