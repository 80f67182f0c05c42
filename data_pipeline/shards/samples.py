"""Training and validation samples, in an order that follows from data, seed and number only.

docs/samples.md says how documents become blocks of sequence_length + 1 ids, and in which order.
There is no state: the ids of a sample follow from its number. So the order does not depend on data-
or tensor-parallel size, and a resume at any number is exact.

These classes take the place of megatron-core's GPTDataset, whose index cache ignores the content of
the shards (a replaced shard keeps the old index) and whose blending needs a process group. The
.bin/.idx files are those of megatron-core's IndexedDataset; they are opened on first read and hold
no descriptor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards.documents import FORGET_AFTER, Documents, block_count
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.permutation import (
    ArrayCache,
    Epoch,
    IndexArray,
    Int64Array,
    collect,
    index_type,
    permutation,
)


class TrainingSamples:
    """Endless training samples: n is sample n % samples_per_epoch of epoch n // samples_per_epoch.

    Files are opened on first use.

    Args:
        sequence_length: Tokens that a sample predicts.
        seed: Seed of the order.
        cache_directory: Directory that keeps each epoch's order as memory-mapped .npy files, which
            the processes of a machine share; None keeps the current epochs' in memory (12 bytes a
            document and 4 a sample).
        source: Source whose documents are taken; None takes all.
        salt: Text that changes the order; members of a blend have different salts.
        forget_after: Reads of documents after which their pages are dropped from the process's
            memory.
    """

    def __init__(
        self,
        manifest: Manifest,
        sequence_length: int,
        seed: int,
        cache_directory: Path | None = None,
        source: str | None = None,
        salt: str = "",
        forget_after: int = FORGET_AFTER,
    ) -> None:
        self.sequence_length = sequence_length
        self._key: tuple[int | str, ...] = (seed, salt) if salt else (seed,)
        split_name = f"split train of {manifest.directory}"
        self.samples_per_epoch = block_count(
            manifest.tokens("train", source),
            sequence_length,
            f"source {source} of {split_name}" if source else split_name,
        )
        data = (manifest.fingerprint, "train", source)
        address_cache = self._cache = None
        if cache_directory is not None:
            address_cache = ArrayCache(cache_directory, repr(data))
            self._cache = ArrayCache(cache_directory, repr((*data, sequence_length, seed, salt)))
        self._documents = Documents(manifest, "train", source, forget_after, cache=address_cache)
        self._epochs: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    def blocks(self, sample_numbers: Int64Array) -> Int64Array:
        """Read samples: [n] numbers -> [n, sequence_length + 1] ids, int64. Thread-safe."""
        result = np.empty((len(sample_numbers), self.sequence_length + 1), dtype=np.int64)
        epochs, within = np.divmod(sample_numbers, self.samples_per_epoch)
        for number in np.unique(epochs).tolist():
            rows = epochs == number
            epoch = self.epoch(number)
            starts = np.asarray(epoch.blocks[within[rows]], dtype=np.int64) * self.sequence_length
            result[rows] = self._documents.read(epoch, starts, self.sequence_length + 1)
        return result

    def origins(self, sample_number: int) -> list[str]:
        """Return `SHARD, document NUMBER` of each id of a sample, [sequence_length + 1]."""
        number, within = divmod(sample_number, self.samples_per_epoch)
        epoch = self.epoch(number)
        start = int(epoch.blocks[within]) * self.sequence_length
        positions = np.arange(start, start + self.sequence_length + 1)
        order = np.searchsorted(epoch.ends, positions, side="right") - 1
        return self._documents.names(epoch.documents[order])

    def epoch(self, number: int) -> Epoch:
        """Return the order of epoch `number`: from memory, from the cache, or made now."""
        with self._lock:
            if number not in self._epochs:
                # A batch may cross into the next epoch; more than two at once are never needed.
                while len(self._epochs) > 1:
                    del self._epochs[min(self._epochs)]
                count, blocks = self._documents.count, self.samples_per_epoch
                layout = {
                    "documents": (index_type(count), count),
                    "ends": (np.dtype(np.int64), count + 1),
                    "blocks": (index_type(blocks), blocks),
                }
                build = partial(self._build, number)
                cached = self._cache.get(str(number), layout, build) if self._cache else None
                documents, ends, order = cached or collect(layout, build())
                self._epochs[number] = Epoch(documents, ends.view(np.int64), order)
            return self._epochs[number]

    def _build(self, number: int) -> Iterator[tuple[str, IndexArray]]:
        """Yield the pieces of an epoch's order; only the lengths are in memory as a whole."""
        lengths = self._documents.lengths()
        end = 0
        yield "ends", np.zeros(1, dtype=np.int64)
        for documents in permutation(len(lengths), "documents", *self._key, number):
            yield "documents", documents
            ends = np.cumsum(lengths[documents], dtype=np.int64)
            ends += end
            end = int(ends[-1])
            yield "ends", ends
        # The permutation of the blocks needs the memory.
        del lengths
        for blocks in permutation(self.samples_per_epoch, "blocks", *self._key, number):
            yield "blocks", blocks


class ValidationSamples:
    """First `max_samples` blocks of one source's held-out documents, in their order on disk.

    Of several shard directories that have the source, each gives an equal share of the blocks.

    Args:
        sequence_length: Tokens that a sample predicts.
        max_samples: Samples of all directories together.

    Raises:
        DataError: If a directory lacks the source, or has too few tokens of it for one block.
    """

    def __init__(
        self, manifests: list[Manifest], source: str, sequence_length: int, max_samples: int
    ) -> None:
        if max_samples < 1:
            raise DataError(f"max_samples {max_samples} must be at least 1")
        self.sequence_length = sequence_length
        # Shares differ by one sample at most; the first directories give the larger ones.
        shares = [(max_samples + position) // len(manifests) for position in range(len(manifests))]
        self._parts: list[tuple[Documents, Epoch]] = []
        counts = []
        for manifest, share in zip(manifests, reversed(shares), strict=True):
            if source not in (held_out_sources := manifest.sources("validation")):
                raise DataError(
                    f"{manifest.directory} has no validation documents of source {source!r}; "
                    f"it has {', '.join(held_out_sources) or 'none at all'}"
                )
            data_name = f"source {source} of split validation of {manifest.directory}"
            blocks = block_count(manifest.tokens("validation", source), sequence_length, data_name)
            counts.append(min(blocks, share))
            # The rest of a large held-out set is not read, nor are its documents kept in memory.
            needed = counts[-1] * sequence_length + 1
            documents = Documents(manifest, "validation", source, first_tokens=needed)
            self._parts.append((documents, documents.in_order()))
        self._first: Int64Array = np.cumsum([0, *counts])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._first[-1])

    def blocks(self, sample_numbers: Int64Array) -> Int64Array:
        """Read samples: [n] numbers -> [n, sequence_length + 1] ids, int64.

        Raises:
            IndexError: If a number is not below len().
        """
        if len(sample_numbers) and int(sample_numbers.max()) >= len(self):
            raise IndexError(f"validation sample {int(sample_numbers.max())} of {len(self)}")
        result = np.empty((len(sample_numbers), self.sequence_length + 1), dtype=np.int64)
        part = np.searchsorted(self._first, sample_numbers, side="right") - 1
        for number in np.unique(part).tolist():
            rows = part == number
            documents, epoch = self._parts[number]
            starts = (sample_numbers[rows] - self._first[number]) * self.sequence_length
            result[rows] = documents.read(epoch, starts, self.sequence_length + 1)
        return result
