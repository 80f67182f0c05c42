"""docs/samples.md to the letter: fingerprint, samples of two epochs, a blend, held-out sets.

Nothing of data_pipeline is used for what is expected: only NumPy, hashlib and the page.
"""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.shards.blend import Member, make_blend
from data_pipeline.shards.manifest import read_manifest
from tests.data_pipeline.helpers import Workshop

LENGTH = 24
SEED = 1234


@pytest.fixture(scope="module")
def directories(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories of several shards a source, with all three splits."""
    root = tmp_path_factory.mktemp("page")
    options = {"validation_fraction": 0.1, "test_fraction": 0.1, "shard_bytes": 20_000}
    for name, part in (("one", slice(3)), ("two", slice(3, None))):
        workshop.tokenize(root / name, files=part, **options)
    return [root / "one", root / "two"]


def manifest_of(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    places = [(shard["split"], shard["source"], shard["number"]) for shard in manifest["shards"]]
    assert places == sorted(places) and max(number for *_, number in places) > 1
    return manifest


def fingerprint(directory: Path) -> str:
    manifest = manifest_of(directory)
    lines = [manifest["tokenizer"]["sha256"], manifest["dtype"]]
    for shard in manifest["shards"]:
        keys = ("split", "source", "number", "bin_sha256", "idx_sha256")
        lines.append(" ".join(str(shard[key]) for key in keys))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def documents(directory: Path, split: str, source: str | None) -> list[np.ndarray]:
    """Documents in the manifest's order; the end-of-document id, which no text has, ends each."""
    manifest = manifest_of(directory)
    document_ids = []
    for shard in manifest["shards"]:
        if shard["split"] == split and source in (None, shard["source"]):
            stored = np.fromfile(directory / f"{shard['name']}.bin", manifest["dtype"])
            ids = stored.astype(np.int64)
            ends = np.flatnonzero(ids == manifest["tokenizer"]["eod_id"]) + 1
            document_ids += np.split(ids, ends[:-1])
    return document_ids


def permutation(count: int, *key: object) -> np.ndarray:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(words, kind="stable")


def sample(all_documents: list[np.ndarray], number: int, salt: str | None) -> np.ndarray:
    """Sample `number` of a part, of its own epochs."""
    tokens = sum(map(len, all_documents))
    per_epoch = (tokens - 1) // LENGTH
    epoch = number // per_epoch
    key = (SEED, epoch) if salt is None else (SEED, salt, epoch)
    order = permutation(len(all_documents), "documents", *key)
    stream = np.concatenate([all_documents[document] for document in order])
    block = int(permutation(per_epoch, "blocks", *key)[number % per_epoch])
    return stream[block * LENGTH : block * LENGTH + LENGTH + 1]


def turns(shares: list[Fraction], period: int) -> list[int]:
    """Whose turn every sample of a period is: the earliest deadline first, of the released."""
    counts = [0] * len(shares)
    result = []
    quotas = [int(share * period) for share in shares]
    for position in range(period):
        ready = [
            (-(-(counts[part] + 1) * period // quota), part)
            for part, quota in enumerate(quotas)
            if counts[part] < quota and counts[part] * period // quota <= position
        ]
        _, part = min(ready)
        counts[part] += 1
        result.append(part)
    return result


def test_one_directory(directories: list[Path]) -> None:
    directory = directories[0]
    blend = make_blend([Member(read_manifest(directory))])
    assert blend.fingerprint == fingerprint(directory) == manifest_of(directory)["fingerprint"]
    everything = documents(directory, "train", None)
    per_epoch = (sum(map(len, everything)) - 1) // LENGTH
    numbers = np.array([0, 1, 2, per_epoch - 1, per_epoch, 2 * per_epoch + 3])
    blocks = blend.training_samples(LENGTH, SEED).blocks(numbers)
    for number, block in zip(numbers.tolist(), blocks, strict=True):
        assert np.array_equal(block, sample(everything, number, None)), number


def test_a_blend(directories: list[Path]) -> None:
    one, two = directories
    sources = sorted({shard["source"] for shard in manifest_of(one)["shards"]})[:2]
    weights = dict(zip(sources, (2, 1), strict=True))
    blend = make_blend(
        [Member(read_manifest(one), 0.75, weights), Member(read_manifest(two), 0.25)]
    )
    shares = {
        (one, sources[0]): Fraction(1, 2),
        (one, sources[1]): Fraction(1, 4),
        (two, None): Fraction(1, 4),
    }
    parts = sorted(shares, key=lambda part: (fingerprint(part[0]), part[1] or ""))
    order = turns([shares[part] for part in parts], 4)
    held = {part: documents(part[0], "train", part[1]) for part in parts}
    blocks = blend.training_samples(LENGTH, SEED).blocks(np.arange(400, 424))
    for number, block in zip(range(400, 424), blocks, strict=True):
        which = order[number % 4]
        within = number // 4 * order.count(which) + order[: number % 4].count(which)
        directory, source = part = parts[which]
        salt = f"{fingerprint(directory)} {source or ''}"
        assert np.array_equal(block, sample(held[part], within, salt)), number


def test_held_out(directories: list[Path]) -> None:
    blend = make_blend([Member(read_manifest(directory)) for directory in directories])
    for source, samples in blend.validation_samples(LENGTH, 5).items():
        expected = []
        having = [d for d in directories if documents(d, "validation", source)]
        for position, directory in enumerate(sorted(having, key=fingerprint)):
            share = 5 // len(having) + (position < 5 % len(having))
            stream = np.concatenate(documents(directory, "validation", source))
            blocks = min(share, (len(stream) - 1) // LENGTH)
            expected += [stream[b * LENGTH : b * LENGTH + LENGTH + 1] for b in range(blocks)]
        assert np.array_equal(samples.blocks(np.arange(len(samples))), np.array(expected))
