"""Unigram perplexity of a blend: what a model reaches that knows only how frequent tokens are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.io.files import open_regular, refusing
from data_pipeline.shards.blend import Blend
from data_pipeline.shards.manifest import Manifest, Shard
from data_pipeline.shards.permutation import Int64Array

_MOST_TOKENS = 100_000_000
"""Tokens that are counted of a split."""
_CHUNK_TOKENS = 1 << 22


def unigram_perplexity(blend: Blend) -> float:
    """Return the held-out perplexity of the training tokens' frequencies, add-one smoothed.

    A language model must be well below it. Training tokens count in the blend's proportions,
    held-out tokens as in a validation.

    Raises:
        DataError: If there are no held-out tokens.
    """
    limit = _MOST_TOKENS // len(blend.parts)
    held_out = [
        _token_counts(part.manifest, part.shards("validation"), limit) for part in blend.parts
    ]
    expected = np.sum(held_out, axis=0)
    if not expected.sum():
        raise DataError(
            f"{', '.join(str(manifest.directory) for manifest in blend.manifests)} has no "
            "held-out tokens; tokenise with --validation-fraction above 0, a larger one where "
            "there are few documents"
        )
    train = _train_counts(blend, limit)
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return math.exp(-float(expected @ log_probability) / float(expected.sum()))


def _train_counts(blend: Blend, limit: int) -> np.ndarray:
    """Count each id in training text, in the blend's proportions: [vocab_size]."""
    train = [_token_counts(part.manifest, part.shards("train"), limit) for part in blend.parts]
    total = sum(int(counts.sum()) for counts in train)
    # Of a single part, these are the counts themselves.
    mixed = [
        counts * (total * float(part.share) / int(counts.sum()))
        for part, counts in zip(blend.parts, train, strict=True)
    ]
    return np.asarray(np.sum(mixed, axis=0))


def _token_counts(manifest: Manifest, shards: Sequence[Shard], max_tokens: int) -> Int64Array:
    """Count the occurrences [vocab_size] of each id in about `max_tokens` of some shards.

    Beyond that limit, only the first tokens of each shard count, in proportion to its size.
    """
    counts = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    total = sum(shard.tokens for shard in shards)
    for shard in shards:
        path = Path(f"{manifest.prefix(shard)}.bin")
        tokens_to_count = min(shard.tokens, -(-max_tokens * shard.tokens // total))
        with refusing(f"read {path}"), open_regular(path) as stream:
            for start in range(0, tokens_to_count, _CHUNK_TOKENS):
                ids = np.fromfile(
                    stream, manifest.dtype, min(_CHUNK_TOKENS, tokens_to_count - start)
                )
                counts += np.bincount(ids, minlength=len(counts))
    return counts
