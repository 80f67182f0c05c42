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
FORGET_AFTER = 256

# Tokens from which on a stretch of a document is copied by itself: that takes as long as gathering so many.
_LONG_STRETCH = 64


class Documents:
    """All documents of a split (or of one source of it), over all its shards, in the manifest's order."""

    def __init__(
        self, manifest: Manifest, split: str, source: str | None = None, forget_after: int = FORGET_AFTER
    ) -> None:
        self._shards = [open_shard(manifest, shard) for shard in manifest.shards_of(split, source)]
        for shard in self._shards:
            shard.expect_random_access()
        lengths = [shard.lengths for shard in self._shards]
        self.lengths: Int64Array = np.concatenate(lengths)
        # Of each document, where it begins in its own shard; of each shard, its first document.
        self._starts: Int64Array = np.concatenate([np.cumsum(part) - part for part in lengths])
        self._first_document: Int64Array = np.cumsum([0] + [len(part) for part in lengths])
        self._forget_after = forget_after
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

        Where the pieces' stretches of documents lie is worked out for all at once. Long stretches are then
        copied one by one, which is what memory is fastest at; short ones are gathered together, so that many
        tiny documents cost no loop.
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
        targets = np.cumsum(sizes) - sizes
        shard = np.searchsorted(self._first_document, document, side="right") - 1
        flat = np.empty(len(starts) * length, dtype=self._shards[0].tokens.dtype)
        long = sizes >= _LONG_STRETCH
        tokens = [opened.tokens for opened in self._shards]
        for number, origin, target, size in zip(
            *(array[long].tolist() for array in (shard, origins, targets, sizes)), strict=True
        ):
            flat[target : target + size] = tokens[number][origin : origin + size]
        for number in np.unique(shard[~long]).tolist():
            mine = ~long & (shard == number)
            within = _within(sizes[mine])
            found = tokens[number][np.repeat(origins[mine], sizes[mine]) + within]
            flat[np.repeat(targets[mine], sizes[mine]) + within] = found
        self._forget_now_and_then(shard)
        return flat.astype(np.int64).reshape(len(starts), length)

    def _forget_now_and_then(self, read: Int64Array) -> None:
        """Keep the resident size flat: a mapped page would otherwise stay in the process once it was read."""
        with self._lock:
            self._reads += len(read)
            self._touched.update(read.tolist())
            if self._reads < self._forget_after:
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
