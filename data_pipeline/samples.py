"""Shards -> training samples in an order that is a function of (data, seed, sample number) only.

A split's documents form one stream, each ended by the end-of-document id, and the stream is cut into blocks
of sequence_length + 1 ids: inputs are the first sequence_length, targets the last (GPT-2 style packing: a
block may hold several documents, and attention is not reset between them). Neighbouring blocks share one id,
so every id but the stream's first is a target once; the tail too short for a block is dropped. For training,
every epoch permutes the documents, then the blocks, anew.

There is no state: whoever knows a sample's number can have its ids, so the order does not depend on data- or
tensor-parallel size, and resuming at any number is exact.

This takes the place of megatron-core's GPTDataset, whose index cache ignores the content of the shards (a
replaced shard keeps the old index) and whose blending needs a process group. The .bin/.idx files are read
through megatron-core's IndexedDataset.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.files import publish, temporary_path
from data_pipeline.manifest import Manifest
from data_pipeline.reader import open_shard

Int64Array = npt.NDArray[np.int64]

# Part of the cache's name: to be raised when the same arguments come to mean another order.
_ORDER_VERSION = 1


@dataclass(frozen=True)
class _Epoch:
    """The order of one epoch.

    documents: [documents], document numbers as the stream has them.
    ends: [documents + 1], ends[i] is where document i of the stream begins; ends[-1] is the stream's length.
    blocks: [blocks], block numbers in the order of the samples.
    """

    documents: Int64Array
    ends: Int64Array
    blocks: Int64Array


class _Documents:
    """All documents of a split (or of one source of it), over all its shards, in the manifest's order."""

    def __init__(self, manifest: Manifest, split: str, source: str | None = None) -> None:
        self._shards = [open_shard(manifest, shard) for shard in manifest.shards_of(split, source)]
        lengths = [shard.lengths for shard in self._shards]
        self.lengths: Int64Array = np.concatenate(lengths)
        # Of each document, where it begins in its own shard; of each shard, its first document.
        self._starts: Int64Array = np.concatenate([np.cumsum(part) - part for part in lengths])
        self._first_document: Int64Array = np.cumsum([0] + [len(part) for part in lengths])

    def read(self, epoch: _Epoch, start: int, length: int) -> Int64Array:
        """`length` ids of the epoch's stream from position `start`; touches only their documents."""
        block = np.empty(length, dtype=np.int64)
        at = int(np.searchsorted(epoch.ends, start, side="right")) - 1
        filled = 0
        while filled < length:
            document = int(epoch.documents[at])
            shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
            skip = start + filled - int(epoch.ends[at])
            count = min(length - filled, int(self.lengths[document]) - skip)
            begin = int(self._starts[document]) + skip
            block[filled : filled + count] = self._shards[shard].tokens[begin : begin + count]
            filled += count
            at += 1
        return block

    def stream(self, documents: Int64Array, blocks: Int64Array) -> _Epoch:
        """An epoch in which the documents have this order."""
        ends = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum(self.lengths[documents], out=ends[1:])
        return _Epoch(documents, ends, blocks)


def _block_count(tokens: int, sequence_length: int, what: str) -> int:
    if sequence_length < 1:
        raise DataError(f"sequence_length {sequence_length} must be at least 1")
    blocks = (tokens - 1) // sequence_length
    if blocks < 1:
        raise DataError(
            f"{what} has {tokens:,} tokens, too few for one block of sequence_length {sequence_length} + 1; "
            f"shorten data.sequence_length or add data"
        )
    return blocks


def _permutation(count: int, *key: int | str) -> Int64Array:
    """A permutation of range(count) that depends on the key only.

    It sorts Philox's raw output, whose bits NumPy guarantees, unlike those of Generator.permutation.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    keys = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


class TrainingSamples:
    """Endless training samples: sample n is n % samples_per_epoch of epoch n // samples_per_epoch."""

    def __init__(
        self,
        manifest: Manifest,
        sequence_length: int,
        seed: int,
        split: str = "train",
        cache_directory: Path | None = None,
    ) -> None:
        """Open the shards.

        Args:
            cache_directory: where to keep each epoch's order as memory-mapped .npy files, so that the
                processes of a machine share one; None keeps the current epoch's in memory (16 bytes a
                document and 8 a sample).

        Raises:
            DataError: the split has too few tokens for one sample, or a shard cannot be opened.
        """
        self.sequence_length = sequence_length
        self._seed = seed
        self._tokens = manifest.tokens(split)
        self.samples_per_epoch = _block_count(
            self._tokens, sequence_length, f"split {split} of {manifest.directory}"
        )
        self._documents = _Documents(manifest, split)
        self._cache_directory = cache_directory
        self._cache_key = f"{_ORDER_VERSION} {manifest.fingerprint} {split} {sequence_length} {seed}"
        self._epochs: dict[int, _Epoch] = {}

    def blocks(self, sample_numbers: Int64Array) -> Int64Array:
        """[n] sample numbers -> [n, sequence_length + 1] ids, int64. May cross epochs."""
        result = np.empty((len(sample_numbers), self.sequence_length + 1), dtype=np.int64)
        for row, sample in enumerate(sample_numbers.tolist()):
            number, within = divmod(sample, self.samples_per_epoch)
            epoch = self._epoch(number)
            start = int(epoch.blocks[within]) * self.sequence_length
            result[row] = self._documents.read(epoch, start, self.sequence_length + 1)
        return result

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            # A batch may cross into the next epoch; more than two at once are never needed.
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            build = self._build if self._cache_directory is None else self._build_cached
            self._epochs[number] = build(number)
        return self._epochs[number]

    def _build(self, number: int) -> _Epoch:
        documents = _permutation(len(self._documents.lengths), "documents", self._seed, number)
        blocks = _permutation(self.samples_per_epoch, "blocks", self._seed, number)
        return self._documents.stream(documents, blocks)

    def _build_cached(self, number: int) -> _Epoch:
        assert self._cache_directory is not None
        key = hashlib.sha256(f"{self._cache_key} {number}".encode()).hexdigest()[:32]
        paths = [self._cache_directory / f"{key}-{part}.npy" for part in ("documents", "ends", "blocks")]
        if not all(path.exists() for path in paths):
            epoch = self._build(number)
            for path, array in zip(paths, (epoch.documents, epoch.ends, epoch.blocks), strict=True):
                _save(path, array)
        return _Epoch(*(np.load(path, mmap_mode="r") for path in paths))


def _save(path: Path, array: Int64Array) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        with open(temporary, "wb") as stream:
            np.save(stream, array)
        publish(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write the sample cache {path}: {error.strerror or error}") from error


class ValidationSamples:
    """The first `max_samples` blocks of one source's held-out documents, in their order on disk."""

    def __init__(
        self,
        manifest: Manifest,
        source: str,
        sequence_length: int,
        max_samples: int,
        split: str = "validation",
    ) -> None:
        """Open the shards.

        Raises:
            DataError: unknown source, or too few tokens for one block.
        """
        if source not in manifest.sources(split):
            raise DataError(
                f"{manifest.directory} has no {split} documents of source {source!r}; "
                f"it has {', '.join(manifest.sources(split)) or 'none at all'}"
            )
        if max_samples < 1:
            raise DataError(f"max_samples {max_samples} must be at least 1")
        self.sequence_length = sequence_length
        what = f"source {source} of split {split} of {manifest.directory}"
        blocks = _block_count(manifest.tokens(split, source), sequence_length, what)
        self._documents = _Documents(manifest, split, source)
        count = min(blocks, max_samples)
        documents = np.arange(len(self._documents.lengths), dtype=np.int64)
        self._epoch = self._documents.stream(documents, np.arange(count, dtype=np.int64))

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._epoch.blocks)

    def blocks(self, sample_numbers: Int64Array) -> Int64Array:
        """[n] sample numbers below len() -> [n, sequence_length + 1] ids, int64.

        Raises:
            IndexError: a number is not below len().
        """
        starts = self._epoch.blocks[sample_numbers] * self.sequence_length
        result = np.empty((len(starts), self.sequence_length + 1), dtype=np.int64)
        for row, start in enumerate(starts.tolist()):
            result[row] = self._documents.read(self._epoch, start, self.sequence_length + 1)
        return result


def unigram_perplexity(manifest: Manifest, source: str | None = None, max_tokens: int = 100_000_000) -> float:
    """Perplexity of the training tokens' unigram distribution (add-one smoothing) on the held-out tokens.

    What a model reaches that knows how frequent each token is and nothing else: a language model must be
    well below.

    Args:
        source: only this source's held-out tokens (the distribution is that of all training tokens).
        max_tokens: count at most this many tokens of each split, its first.

    Raises:
        DataError: there are no held-out tokens.
    """
    train = _token_counts(manifest, "train", None, max_tokens)
    held_out = _token_counts(manifest, "validation", source, max_tokens)
    if not held_out.sum():
        raise DataError(
            f"{manifest.directory} has no held-out tokens; tokenise with --validation-fraction above 0"
        )
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return math.exp(-float(held_out @ log_probability) / float(held_out.sum()))


def _token_counts(manifest: Manifest, split: str, source: str | None, max_tokens: int) -> Int64Array:
    """[vocab_size] occurrences of each id."""
    counts = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    left = max_tokens
    for shard in manifest.shards_of(split, source):
        opened = open_shard(manifest, shard)
        tokens = opened.tokens[:left]
        for start in range(0, len(tokens), 1 << 22):
            counts += np.bincount(tokens[start : start + (1 << 22)], minlength=len(counts))
        left -= len(tokens)
        if left <= 0:
            break
    return counts
