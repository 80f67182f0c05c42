"""Shards of random ids, made faster than text is tokenised: for memory tests and benchmarks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
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
    made = []
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
        digest = hashlib.sha256(f"{seed} {number}".encode()).hexdigest()
        shard = _shard(prefix.name, number, lengths, index, bin_sha256=digest)
        made.append(replace(shard, source=source))
    return _with_manifest(directory, made)


def _shard(name: str, unit: int, lengths: np.ndarray, index: bytes, bin_sha256: str) -> Shard:
    """What the manifest states of a shard of one unit; its number is 0."""
    total = int(lengths.sum())
    return Shard(
        name=name,
        number=0,
        split="train",
        source="",
        documents=len(lengths),
        tokens=total,
        text_bytes=4 * total,
        bin_bytes=2 * total,
        bin_sha256=bin_sha256,
        idx_bytes=len(index),
        idx_sha256=hashlib.sha256(index).hexdigest(),
        units=(unit,),
        unit_documents=(len(lengths),),
    )


def _with_manifest(directory: Path, shards: list[Shard]) -> Manifest:
    model = directory / "tokenizer.model"
    model.write_bytes(b"no model")
    digest = hashlib.sha256(b"no model").hexdigest()
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": EOD, "pad_id": -1, "eod_id": EOD}
    tokenizer = TokenizerIdentity(model.name, digest, VOCAB_SIZE, "unigram", **ids)
    manifest = Manifest(
        directory=directory,
        format_version=FORMAT_VERSION,
        name="random",
        tokenizer=tokenizer,
        dtype="uint16",
        options={},
        inputs=(),
        shards=tuple(shards),
        rejects={},
    )
    write_manifest(manifest)
    return manifest
