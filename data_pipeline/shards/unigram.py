"""The yardstick of a language model: what knowing only how frequent each token is achieves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest, Shard
from data_pipeline.shards.permutation import Int64Array

_CHUNK_TOKENS = 1 << 22


def perplexity(train: np.ndarray, held_out: Int64Array, where: str) -> float:
    """Perplexity of the unigram distribution of training tokens (add-one smoothing) on held-out tokens.

    It is what a model reaches that knows how frequent each token is and nothing else. A language model must
    be well below it.

    Args:
        train, held_out: [vocab_size] how often each id occurs.
        where: what to call the data in the message.

    Raises:
        DataError: there are no held-out tokens.
    """
    if not held_out.sum():
        raise DataError(f"{where} has no held-out tokens; tokenise with --validation-fraction above 0")
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return math.exp(-float(held_out @ log_probability) / float(held_out.sum()))


def token_counts(manifest: Manifest, shards: Sequence[Shard], max_tokens: int) -> Int64Array:
    """[vocab_size] occurrences of each id in the first `max_tokens` of some of a manifest's shards."""
    counts = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    left = max_tokens
    for shard in shards:
        path, wanted = Path(f"{manifest.prefix(shard)}.bin"), min(left, shard.tokens)
        try:
            with open(path, "rb") as stream:
                for start in range(0, wanted, _CHUNK_TOKENS):
                    count = min(_CHUNK_TOKENS, wanted - start)
                    counts += np.bincount(np.fromfile(stream, manifest.dtype, count), minlength=len(counts))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        left -= wanted
        if left <= 0:
            break
    return counts
