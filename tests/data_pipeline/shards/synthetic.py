"""Shards of random ids, made faster than text is tokenised: for memory tests and benchmarks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.shards.manifest import FORMAT_VERSION, Manifest, Shard, write_manifest
from data_pipeline.shards.writing import index_bytes, shard_name
from data_pipeline.tokenizer.identity import TokenizerIdentity

MEAN_DOCUMENT = 862  # tokens, as in SlimPajama: a billion tokens are 1.16 M documents
VOCAB_SIZE = 32_000
EOD = 2


def random_shards(directory: Path, tokens: int, shards: int, seed: int = 0) -> Manifest:
    """A directory of about `tokens` uint16 ids in documents of exponential length.

    There is one source a shard. The manifest states made-up SHA-256s for the .bin files, so
    `verify` would complain; training would not.
    """
    directory.mkdir(parents=True)
    generator = np.random.Generator(np.random.Philox(seed))
    pattern = generator.integers(3, VOCAB_SIZE, 1 << 22, dtype=np.uint16)
    shard_entries = []
    for number in range(shards):
        count = tokens // shards // MEAN_DOCUMENT
        lengths = 1 + generator.exponential(MEAN_DOCUMENT - 1, count).astype(np.int32)
        total = int(lengths.sum())
        source = f"source{number}"
        prefix = directory / shard_name("random", "train", source, 0)
        with open(f"{prefix}.bin", "wb") as stream:
            for start in range(0, total, len(pattern)):
                stream.write(pattern[: total - start].tobytes())
        index = index_bytes(lengths, "uint16")
        Path(f"{prefix}.idx").write_bytes(index)
        shard = Shard(
            name=prefix.name,
            number=0,
            split="train",
            source=source,
            documents=count,
            tokens=total,
            text_bytes=4 * total,
            bin_bytes=2 * total,
            bin_sha256=hashlib.sha256(f"{seed} {number}".encode()).hexdigest(),
            idx_bytes=len(index),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            units=(number,),
            unit_documents=(count,),
        )
        shard_entries.append(shard)
    (directory / "tokenizer.model").write_bytes(b"no model")
    digest = hashlib.sha256(b"no model").hexdigest()
    manifest = manifest_of(directory, shard_entries, VOCAB_SIZE, sha256=digest)
    write_manifest(manifest)
    return manifest


def manifest_of(
    directory: Path, shards: Sequence[Shard], vocab_size: int, sha256: str = "0" * 64
) -> Manifest:
    """The manifest of these shards, under a tokenizer of this hash that nobody trained."""
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": EOD, "pad_id": -1, "eod_id": EOD}
    return Manifest(
        directory=directory,
        format_version=FORMAT_VERSION,
        name="synthetic",
        tokenizer=TokenizerIdentity("tokenizer.model", sha256, vocab_size, "unigram", **ids),
        dtype="uint16",
        options={},
        inputs=(),
        shards=tuple(shards),
        rejects={},
    )
