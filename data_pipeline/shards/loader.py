"""Reading blocks ahead in threads.

It is for storage that is slow to answer: a thread that waits for a page holds no lock. Where the shards are
in the page cache, reading is a small part of a step and there is nothing to gain (benchmarks.data.samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from data_pipeline.shards.permutation import Int64Array


class Samples(Protocol):
    """Numbered samples that several threads may read."""

    def blocks(self, sample_numbers: Int64Array) -> Int64Array:
        """[n] sample numbers -> [n, sequence_length + 1] ids."""
        ...


class Loader:
    """Gives the blocks it is asked for, and meanwhile reads those that it was told will be asked for next.

    What it gives depends on the numbers only, never on the number of threads or on what was announced.
    """

    def __init__(self, samples: Samples, workers: int) -> None:
        """Start the threads.

        Args:
            workers: threads; with 0, blocks are read when they are asked for.
        """
        self._samples = samples
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "loader") if workers else None
        self._ahead: dict[bytes, list[Future[Int64Array]]] = {}

    def blocks(self, numbers: Int64Array, following: Sequence[Int64Array] = ()) -> Int64Array:
        """[n] sample numbers -> [n, sequence_length + 1] ids.

        Args:
            following: the numbers of the next calls; what was announced and is not among them is dropped.

        Raises:
            DataError: whatever reading raised, in this call or in a thread.
        """
        if self._pool is None:
            return self._samples.blocks(numbers)
        parts = self._ahead.pop(numbers.tobytes(), None) or self._submit(self._pool, numbers)
        wanted = {later.tobytes(): later for later in following}
        for key in self._ahead.keys() - wanted.keys():
            for future in self._ahead.pop(key):
                future.cancel()
        for key in [key for key in wanted if key not in self._ahead]:
            self._ahead[key] = self._submit(self._pool, wanted[key])
        return np.concatenate([part.result() for part in parts])

    def close(self) -> None:
        """Stop the threads; whatever they have not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._ahead.clear()

    def _submit(self, pool: ThreadPoolExecutor, numbers: Int64Array) -> list[Future[Int64Array]]:
        parts = np.array_split(numbers, min(self._workers, max(1, len(numbers))))
        return [pool.submit(self._samples.blocks, part) for part in parts]
