"""This rank's samples of a global batch, and their tokens.

A global batch is the next samples after `consumed_samples` in one order over the whole run, dealt
out in rounds of micro_batch_size × data-parallel size. Tensor-parallel ranks read the same samples;
nothing is broadcast.
"""

from __future__ import annotations

import numpy as np
import torch

from data_pipeline.shards.blend import BlendedSamples
from data_pipeline.shards.loader import Loader
from data_pipeline.shards.permutation import Int64Array
from pretrain.config.sections import DataSection
from pretrain.ranks.groups import ParallelContext

SAMPLES_AT_ONCE = 64
"""Samples per read; enough that the fixed cost of a call is small."""


def rank_samples(
    consumed_samples: int,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Int64Array:
    """Return the samples of a data-parallel rank in a global batch.

    Args:
        consumed_samples: Number of samples of the run before this batch.
        global_batch_size: Samples per step, over all ranks.
        micro_batch_size: Samples per forward pass.

    Returns:
        Sample numbers `[micro batches, micro_batch_size]`.
    """
    numbers = np.arange(consumed_samples, consumed_samples + global_batch_size, dtype=np.int64)
    return numbers.reshape(-1, data_parallel_size, micro_batch_size)[:, data_parallel_rank]


class Batches:
    """This rank's part of every global batch.

    The parts of several batches are read in one call, and `data.loader_workers` threads read the
    next ones meanwhile. Neither changes the content of a batch.

    Args:
        samples: Samples of the whole run, in order.
        total_steps: Optimizer steps of the run; nothing is read beyond them.
    """

    def __init__(
        self,
        samples: BlendedSamples,
        data: DataSection,
        total_steps: int,
        context: ParallelContext,
    ) -> None:
        self._data = data
        self._end = total_steps * data.global_batch_size
        self._context = context
        self._loader = Loader(samples, data.loader_workers)
        self._read: dict[int, torch.Tensor] = {}

    def at(self, consumed_samples: int) -> torch.Tensor:
        """Return the ids of the batch that starts at a sample.

        Returns:
            `[micro batches, micro_batch_size, sequence_length + 1]` on the CPU, in pinned memory if
            the model is on a GPU.

        Raises:
            DataError: a shard or the order of a new epoch could not be read.
        """
        self.read(consumed_samples)
        return self._read.pop(consumed_samples)

    def read(self, consumed_samples: int) -> None:
        """Read the batch that starts at a sample into memory, while a GPU works.

        Raises:
            DataError: as `at`.
        """
        if consumed_samples in self._read:
            return
        now, later = self._numbers(consumed_samples)
        blocks = torch.from_numpy(
            self._loader.blocks(now.ravel(), [later.ravel()] if later.size else [])
        )
        if self._context.device.type == "cuda":
            blocks = blocks.pin_memory()  # so that the copy to the device is asynchronous
        starts = range(
            consumed_samples,
            consumed_samples + len(now) * self._data.global_batch_size,
            self._data.global_batch_size,
        )
        self._read = dict(zip(starts, blocks.view(*now.shape, -1), strict=True))

    def close(self) -> None:
        """Stop reading ahead."""
        self._loader.close()

    def _numbers(self, consumed_samples: int) -> tuple[Int64Array, Int64Array]:
        """Return sample numbers `[batches, micro batches, micro_batch_size]` to read now and next.

        The numbers stop at the end of the run, beyond which another epoch would need its order.
        """
        data, context = self._data, self._context
        batches_at_once = max(
            1, SAMPLES_AT_ONCE * context.data_parallel_size // data.global_batch_size
        )
        end = max(self._end, consumed_samples + 1)
        starts = range(consumed_samples, end, data.global_batch_size)[: 2 * batches_at_once]
        numbers = [
            rank_samples(
                start,
                global_batch_size=data.global_batch_size,
                micro_batch_size=data.micro_batch_size,
                data_parallel_rank=context.data_parallel_rank,
                data_parallel_size=context.data_parallel_size,
            )
            for start in starts
        ]
        return np.stack(numbers[:batches_at_once]), np.array(
            numbers[batches_at_once:], dtype=np.int64
        )
