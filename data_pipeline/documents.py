"""The documents of a split as one address space, and reading of many blocks at once."""

from __future__ import annotations

import threading

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest
from data_pipeline.order import Epoch, IndexArray, Int64Array
from data_pipeline.reader import open_shard

# A document that is read brings its neighbourhood into the process: the kernel maps 64 KiB around a touched
# page, or a whole 2 MiB page where it caches files in such. So this many reads leave 16 to 512 MiB behind.
_READS_BEFORE_FORGETTING = 256


class Documents:
    """All documents of a split (or of one source of it), over all its shards, in the manifest's order."""

    def __init__(self, manifest: Manifest, split: str, source: str | None = None) -> None:
        self._shards = [open_shard(manifest, shard) for shard in manifest.shards_of(split, source)]
        for shard in self._shards:
            shard.expect_random_access()
        lengths = [shard.lengths for shard in self._shards]
        self.lengths: Int64Array = np.concatenate(lengths)
        # Of each document, where it begins in its own shard; of each shard, its first document.
        self._starts: Int64Array = np.concatenate([np.cumsum(part) - part for part in lengths])
        self._first_document: Int64Array = np.cumsum([0] + [len(part) for part in lengths])
        self._reads = 0
        self._touched: set[int] = set()
        self._lock = threading.Lock()

    def stream(self, documents: IndexArray, blocks: IndexArray) -> Epoch:
        """An epoch in which the documents have this order."""
        ends = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum(self.lengths[documents], out=ends[1:])
        return Epoch(documents, ends, blocks)

    def read(self, epoch: Epoch, starts: Int64Array, length: int) -> Int64Array:
        """Pieces of the epoch's stream: [n] positions -> [n, length] ids, int64.

        Vectorised over all pieces and the documents they touch; the only loop is over shards that hold one.
        """
        first = np.searchsorted(epoch.ends, starts, side="right") - 1
        counts = np.searchsorted(epoch.ends, starts + length, side="left") - first
        row = np.repeat(np.arange(len(starts)), counts)
        at = np.repeat(first, counts) + _within(counts)
        document = np.asarray(epoch.documents[at], dtype=np.int64)
        begins = epoch.ends[at]
        low = np.maximum(begins, starts[row])
        sizes = np.minimum(epoch.ends[at + 1], starts[row] + length) - low
        origins = self._starts[document] + (low - begins)
        flat = np.empty(len(starts) * length, dtype=np.int64)
        touched = [0]
        if len(self._shards) == 1:
            flat[:] = self._shards[0].tokens[np.repeat(origins, sizes) + _within(sizes)]
        else:
            touched = self._gather(document, origins, sizes, flat)
        self._forget_now_and_then(len(document), touched)
        return flat.reshape(len(starts), length)

    def _gather(
        self, document: Int64Array, origins: Int64Array, sizes: Int64Array, flat: Int64Array
    ) -> list[int]:
        """Copy `sizes[i]` ids from `origins[i]` of document i's shard, one stretch after the other.

        Returns:
            The shards that were read.
        """
        targets = np.cumsum(sizes) - sizes
        shard = np.searchsorted(self._first_document, document, side="right") - 1
        order = np.argsort(shard, kind="stable")
        touched, begins = np.unique(shard[order], return_index=True)
        for number, mine in zip(touched.tolist(), np.split(order, begins[1:]), strict=True):
            tokens, within = self._shards[number].tokens, _within(sizes[mine])
            source = np.repeat(origins[mine], sizes[mine]) + within
            flat[np.repeat(targets[mine], sizes[mine]) + within] = tokens[source]
        return touched.tolist()

    def _forget_now_and_then(self, reads: int, touched: list[int]) -> None:
        """Keep the resident size flat: a mapped page would otherwise stay in the process once it was read."""
        with self._lock:
            self._reads += reads
            self._touched.update(touched)
            if self._reads < _READS_BEFORE_FORGETTING:
                return
            forget, self._touched, self._reads = self._touched, set(), 0
        for number in forget:
            self._shards[number].forget_pages()


def block_count(tokens: int, sequence_length: int, what: str) -> int:
    """How many blocks of sequence_length + 1 ids, each sharing one with the next, `tokens` make.

    Raises:
        DataError: not one.
    """
    if sequence_length < 1:
        raise DataError(f"sequence_length {sequence_length} must be at least 1")
    blocks = (tokens - 1) // sequence_length
    if blocks < 1:
        raise DataError(
            f"{what} has {tokens:,} tokens, too few for one block of sequence_length {sequence_length} + 1; "
            f"shorten data.sequence_length or add data"
        )
    return blocks


def _within(counts: IndexArray) -> Int64Array:
    """[3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
