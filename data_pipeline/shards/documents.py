"""Documents of a split as one address space, and reading of many blocks at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.permutation import ArrayCache, Epoch, IndexArray, Int64Array, collect
from data_pipeline.shards.reading import ShardPool, lengths_of

# Each read of a document maps its neighbourhood into the process: 64 KiB around a touched page, or
# 2 MiB where the kernel caches files in huge pages. So this many reads leave 16 to 512 MiB behind.
FORGET_AFTER = 256

# Stretches of at least so many tokens are copied one by one: a copy then takes no longer than
# gathering the tokens.
_LONG_STRETCH = 64


class Documents:
    """All documents of a split, or of one source of it, over all shards, in the manifest's order.

    Shards are opened on first use. A document's address is the index of its first id in the
    concatenated ids of all shards.

    Args:
        source: Source whose documents are taken; None takes all.
        forget_after: Reads of documents after which their pages are dropped from the process's
            memory.
        cache: Cache of the addresses; None computes them.
        first_tokens: Number of leading ids whose shards are taken; None takes all shards.
    """

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        source: str | None = None,
        forget_after: int = FORGET_AFTER,
        cache: ArrayCache | None = None,
        first_tokens: int | None = None,
    ) -> None:
        self._manifest = manifest
        self._shards = manifest.shards_of(split, source)
        self._first_token: Int64Array = np.cumsum([0] + [shard.tokens for shard in self._shards])
        if first_tokens is not None:
            needed = int(np.searchsorted(self._first_token, first_tokens))
            self._shards = self._shards[:needed]
            self._first_token = self._first_token[: needed + 1]
        self._pool = ShardPool(manifest, self._shards)
        self._dtype = np.dtype(manifest.dtype)
        self.count = sum(shard.documents for shard in self._shards)
        self._forget_after = forget_after
        self._cache = cache
        self._reads = 0
        self._touched: set[int] = set()
        self._lock = threading.Lock()

    @functools.cached_property
    def addresses(self) -> Int64Array:
        """Return [documents + 1] int64: the first id of every document, the end of the last."""
        layout = {"addresses": (np.dtype(np.int64), self.count + 1)}
        cached = self._cache.get("addresses", layout, self._address_pieces) if self._cache else None
        (addresses,) = cached or collect(layout, self._address_pieces())
        return addresses.view(np.int64)

    def _address_pieces(self) -> Iterator[tuple[str, Int64Array]]:
        """Yield the pieces of `addresses`, shard after shard."""
        yield "addresses", np.zeros(1, dtype=np.int64)
        for shard, first in zip(self._shards, self._first_token.tolist()[:-1], strict=True):
            yield "addresses", first + np.cumsum(lengths_of(self._manifest, shard), dtype=np.int64)

    def lengths(self) -> npt.NDArray[np.int32]:
        """Read the number of tokens of every document, [documents] int32, from the shards."""
        lengths = np.empty(self.count, dtype=np.int32)
        first = 0
        for shard in self._shards:
            lengths[first : first + shard.documents] = lengths_of(self._manifest, shard)
            first += shard.documents
        return lengths

    def in_order(self) -> Epoch:
        """Return an epoch without blocks, with the documents in the order of the shards."""
        documents = np.arange(self.count, dtype=np.int64)
        return Epoch(documents, self.addresses, documents[:0])

    def names(self, documents: IndexArray) -> list[str]:
        """Return `SHARD, document NUMBER` for each document."""
        first = np.cumsum([0] + [shard.documents for shard in self._shards])
        shards = np.searchsorted(first, documents, side="right") - 1
        numbers = np.asarray(documents, dtype=np.int64) - first[shards]
        pairs = zip(shards.tolist(), numbers.tolist(), strict=True)
        return [f"{self._shards[shard].name}, document {number}" for shard, number in pairs]

    def read(self, epoch: Epoch, starts: Int64Array, length: int) -> Int64Array:
        """Read parts of the epoch's stream.

        Each part consists of stretches of documents. All stretches are located with array
        operations. Long ones are then copied one by one, which is fastest for memory; short ones
        are gathered together, so that many tiny documents cost no loop.

        Args:
            epoch: Order of the documents.
            starts: [n] positions in the stream.
            length: Ids per part.

        Returns:
            [n, length] ids, int64.
        """
        # [n]: the first document of each part, and the number of documents that the part touches.
        first = np.searchsorted(epoch.ends, starts, side="right") - 1
        counts = np.searchsorted(epoch.ends, starts + length, side="left") - first
        # [stretches] from here on: the part, and the document's position in the epoch.
        row = np.repeat(np.arange(len(starts)), counts)
        positions = np.repeat(first, counts) + _within(counts)
        begins = epoch.ends[positions]
        low = np.maximum(begins, starts[row])
        sizes = np.minimum(epoch.ends[positions + 1], starts[row] + length) - low
        origins = self.addresses[np.asarray(epoch.documents[positions], dtype=np.int64)] + (
            low - begins
        )
        shard = np.searchsorted(self._first_token, origins, side="right") - 1
        origins -= self._first_token[shard]
        targets = np.cumsum(sizes) - sizes
        flat = np.empty(len(starts) * length, dtype=self._dtype)
        is_long = sizes >= _LONG_STRETCH
        tokens = {number: self._pool.tokens(number) for number in np.unique(shard).tolist()}
        for number, origin, target, size in zip(
            *(array[is_long].tolist() for array in (shard, origins, targets, sizes)), strict=True
        ):
            flat[target : target + size] = tokens[number][origin : origin + size]
        for number in np.unique(shard[~is_long]).tolist():
            in_shard = ~is_long & (shard == number)
            within = _within(sizes[in_shard])
            ids = tokens[number][np.repeat(origins[in_shard], sizes[in_shard]) + within]
            flat[np.repeat(targets[in_shard], sizes[in_shard]) + within] = ids
        self._forget_now_and_then(len(shard), tokens.keys())
        return flat.astype(np.int64).reshape(len(starts), length)

    def _forget_now_and_then(self, reads: int, shards: Iterable[int]) -> None:
        """Keep the resident size flat: a mapped page stays in the process once it was read."""
        with self._lock:
            self._reads += reads
            self._touched.update(shards)
            if self._reads < self._forget_after:
                return
            shards_to_forget = self._touched
            self._touched = set()
            self._reads = 0
        self._pool.forget_pages(shards_to_forget)


def block_count(tokens: int, sequence_length: int, what: str) -> int:
    """Count the blocks of sequence_length + 1 ids; neighbouring blocks share one id.

    Args:
        tokens: Number of ids.
        sequence_length: Tokens that a block predicts.
        what: Name of the data, for the message.

    Raises:
        DataError: If there is not one whole block.
    """
    if sequence_length < 1:
        raise DataError(f"sequence_length {sequence_length} must be at least 1")
    blocks = (tokens - 1) // sequence_length
    if blocks < 1:
        raise DataError(
            f"{what} has {tokens:,} tokens, too few for one block of sequence_length "
            f"{sequence_length} + 1; shorten data.sequence_length or add data"
        )
    return blocks


def _within(counts: IndexArray) -> Int64Array:
    """Count up from 0 for every count: [3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(
        np.cumsum(counts) - counts, counts
    )
