"""Threads that read blocks ahead.

Reading ahead is for storage that is slow to answer: a thread that waits for a page holds no lock.
If the shards are in the page cache, reading is a small part of a step and there is nothing to gain
(docs/samples.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from data_pipeline.shards.blend import BlendedSamples
from data_pipeline.shards.permutation import Int64Array
from data_pipeline.shards.samples import TrainingSamples


class Loader:
    """Reader of blocks that prefetches those announced for the next calls.

    The blocks depend on the sample numbers only, never on the number of threads or on the
    announcements.

    Args:
        workers: Threads; with 0, blocks are read when they are asked for.
    """

    def __init__(self, samples: BlendedSamples | TrainingSamples, workers: int) -> None:
        self._samples = samples
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "loader") if workers else None
        self._ahead: dict[bytes, list[Future[Int64Array]]] = {}

    def blocks(self, numbers: Int64Array, following: Sequence[Int64Array] = ()) -> Int64Array:
        """Read samples.

        Args:
            numbers: [n] numbers of samples.
            following: Numbers of the next calls; earlier announcements are dropped.

        Returns:
            [n, sequence_length + 1] ids, int64.
        """
        if self._pool is None:
            return self._samples.blocks(numbers)
        parts = self._ahead.pop(numbers.tobytes(), None) or self._submit(self._pool, numbers)
        announced = {later.tobytes(): later for later in following}
        for key in self._ahead.keys() - announced.keys():
            for future in self._ahead.pop(key):
                future.cancel()
        for key in [key for key in announced if key not in self._ahead]:
            self._ahead[key] = self._submit(self._pool, announced[key])
        return np.concatenate([part.result() for part in parts])

    def close(self) -> None:
        """Stop the threads and drop the reads that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._ahead.clear()

    def _submit(self, pool: ThreadPoolExecutor, numbers: Int64Array) -> list[Future[Int64Array]]:
        parts = np.array_split(numbers, min(self._workers, max(1, len(numbers))))
        return [pool.submit(self._samples.blocks, part) for part in parts]
