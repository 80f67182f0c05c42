"""Shards of random ids, made faster than any text could be tokenised: for memory tests and benchmarks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from data_pipeline.shards.manifest import (
    FORMAT_VERSION,
    Manifest,
    Shard,
    shard_from_json,
    write_manifest,
)
from data_pipeline.shards.writing import index_bytes, shard_name
from data_pipeline.tokenizer.identity import TokenizerIdentity

MEAN_DOCUMENT = 862  # tokens, as in SlimPajama: a billion tokens are 1.16 M documents
VOCAB_SIZE, EOD = 32_000, 2


def random_shards(directory: Path, tokens: int, shards: int, seed: int = 0) -> Manifest:
    """A directory of about `tokens` uint16 ids in documents of exponential length, one source a shard.

    The manifest states made-up SHA-256s for the .bin files, so `verify` would complain; training would not.
    """
    directory.mkdir(parents=True)
    generator = np.random.Generator(np.random.Philox(seed))
    pattern = generator.integers(3, VOCAB_SIZE, 1 << 22, dtype=np.uint16)
    made = []
    for number in range(shards):
        count = tokens // shards // MEAN_DOCUMENT
        lengths = 1 + generator.exponential(MEAN_DOCUMENT - 1, count).astype(np.int32)
        total, source = int(lengths.sum()), f"source{number}"
        prefix = directory / shard_name("random", "train", source, 0)
        with open(f"{prefix}.bin", "wb") as stream:
            for start in range(0, total, len(pattern)):
                stream.write(pattern[: total - start].tobytes())
        index = index_bytes(lengths, "uint16")
        Path(f"{prefix}.idx").write_bytes(index)
        facts = {
            "name": prefix.name,
            "number": 0,
            "split": "train",
            "source": source,
            "documents": count,
        }
        facts |= {"units": [number], "unit_documents": [count]}
        facts |= {
            "tokens": total,
            "text_bytes": 4 * total,
            "bin_bytes": 2 * total,
            "idx_bytes": len(index),
        }
        digests = {"bin_sha256": hashlib.sha256(f"{seed} {number}".encode()).hexdigest()}
        digests["idx_sha256"] = hashlib.sha256(index).hexdigest()
        made.append(shard_from_json(facts | digests))
    return _with_manifest(directory, made)


def sparse_shards(
    directory: Path, tokens: int, sources: int, shard_bytes: int = 1_000_000_000
) -> Manifest:
    """About `tokens` ids in shards of `shard_bytes`: real .idx files, and .bin files that are holes."""
    directory.mkdir(parents=True)
    generator = np.random.Generator(np.random.Philox(0))
    count = shard_bytes // (2 * MEAN_DOCUMENT + 20)
    lengths = 1 + generator.exponential(MEAN_DOCUMENT - 1, count).astype(np.int32)
    index, total = index_bytes(lengths, "uint16"), int(lengths.sum())
    digest = hashlib.sha256(index).hexdigest()
    made = []
    for number in range(-(-tokens // total)):
        source, number_of_source = f"source{number % sources}", number // sources
        name = shard_name("sparse", "train", source, number_of_source)
        (directory / f"{name}.idx").write_bytes(index)
        with open(directory / f"{name}.bin", "wb") as stream:
            stream.truncate(2 * total)
        facts = {"name": name, "number": number_of_source, "split": "train", "source": source}
        facts |= {
            "documents": count,
            "tokens": total,
            "text_bytes": 4 * total,
            "bin_bytes": 2 * total,
        }
        facts |= {
            "idx_bytes": len(index),
            "idx_sha256": digest,
            "units": [number],
            "unit_documents": [count],
        }
        made.append(shard_from_json(facts | {"bin_sha256": f"{number:064}"}))
    return _with_manifest(directory, made)


def _with_manifest(directory: Path, shards: list[Shard]) -> Manifest:
    model = directory / "tokenizer.model"
    model.write_bytes(b"no model")
    digest = hashlib.sha256(b"no model").hexdigest()
    tokenizer = TokenizerIdentity(model.name, digest, VOCAB_SIZE, "unigram", 0, 1, EOD, -1, EOD)
    manifest = Manifest(
        directory, FORMAT_VERSION, "random", tokenizer, "uint16", {}, (), tuple(shards), {}
    )
    write_manifest(manifest)
    return manifest
