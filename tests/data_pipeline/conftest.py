"""Corpus, tokenizers and shard directory for all tests of the package; real text from this Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.demo_corpus import build_corpus
from data_pipeline.io.lease import Lease
from data_pipeline.shards.manifest import FORMAT_VERSION, Manifest, shard_from_json
from data_pipeline.shards.writing import ShardWriter, shard_name
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.tokenizer.identity import TokenizerIdentity
from data_pipeline.tokenizer.train import TrainerSettings, train_tokenizer
from tests.data_pipeline.helpers import MakeManifest, ShardSpec, Workshop, write_documents


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The session's corpus, tokenizer and shards; tests must not change them."""

    def build(root: Path) -> None:
        build_corpus(root / "corpus", 8)
        settings = TrainerSettings(vocab_size=1000, sample_bytes=400_000)
        train_tokenizer(find_inputs([root / "corpus"]), root / "small", settings, RecordKeys())
        workshop_at(root).tokenize(root / "shards")

    return workshop_at(made_once(tmp_path_factory, "workshop", build))


def workshop_at(root: Path) -> Workshop:
    return Workshop(root / "corpus", root / "small.model", root / "shards")


@pytest.fixture(scope="session")
def other_model(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE model of 400 pieces, with its report."""
    return train_once(tmp_path_factory, workshop, "bpe", TrainerSettings(400, sample_bytes=50_000))


@pytest.fixture(scope="session")
def unigram_model(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A unigram model of 600 pieces, with its report."""
    return train_once(tmp_path_factory, workshop, "unigram", TrainerSettings(600, "unigram", 100_000))


def train_once(
    factory: pytest.TempPathFactory, workshop: Workshop, name: str, settings: TrainerSettings
) -> Path:
    def build(root: Path) -> None:
        train_tokenizer(find_inputs([workshop.corpus]), root / "other", settings, RecordKeys())

    return made_once(factory, name, build) / "other.model"


def made_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """A directory that one of pytest-xdist's processes fills, for all of them and the whole session."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    root = shared / f"data_pipeline-{name}"
    with Lease(shared / f"{root.name}.lock", f"making {root}", wait_seconds=600):
        done = root / ".done"
        if not done.exists():
            root.mkdir()
            build(root)
            done.touch()
    return root


@pytest.fixture
def make_manifest(tmp_path: Path) -> MakeManifest:
    """A manifest over hand-made documents: [(split, source, unit, [ids, ids, ...]), ...]; eod is 2."""

    def make(specs: list[ShardSpec]) -> Manifest:
        directory = tmp_path / "hand-made"
        directory.mkdir()
        shards = []
        for split, source, unit, documents in specs:
            writer = ShardWriter(directory / shard_name("hand", split, source, unit), "uint16")
            write_documents(writer, [np.array(ids, dtype=np.int32) for ids in documents])
            identity = {"name": writer.prefix.name, "number": unit, "split": split, "source": source}
            parts = {"text_bytes": 0, "units": [unit], "unit_documents": [len(documents)]}
            shards.append(shard_from_json(identity | parts | writer.finish()))
        tokenizer = TokenizerIdentity("x.model", "0" * 64, 60_000, "unigram", 0, 1, 2, -1, 2)
        return Manifest(directory, FORMAT_VERSION, "hand", tokenizer, "uint16", {}, (), tuple(shards), {})

    return make
