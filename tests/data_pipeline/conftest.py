"""Corpus, tokenizers and shards for all tests of the package; real text from this Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.shards.manifest import Manifest, Shard
from data_pipeline.shards.writing import ShardWriter, shard_name
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.tokenizer.train import TrainerSettings, train_tokenizer
from tests.conftest import shared_directory
from tests.data_pipeline.helpers import MakeManifest, ShardSpec, Workshop, write_documents
from tests.data_pipeline.shards.synthetic import manifest_of


@pytest.fixture(scope="session")
def workshop(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Return the session's corpus, tokenizer and shards; tests must not change them.

    The processes of pytest-xdist share them, and the two models below.
    """
    with shared_directory(tmp_path_factory, "workshop") as (root, complete):
        workshop = Workshop(prose, root / "small.model", root / "shards")
        if not complete:
            settings = TrainerSettings(vocab_size=1000, sample_bytes=400_000)
            train_tokenizer(find_inputs([prose]).files, root / "small", settings, RecordKeys())
            workshop.tokenize(workshop.shards)
    return workshop


@pytest.fixture
def shards(workshop: Workshop, tmp_path: Path) -> Path:
    """A copy of the session's shards, to damage or falsify."""
    return Path(shutil.copytree(workshop.shards, tmp_path / "shards"))


@pytest.fixture(scope="session")
def other_model(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a BPE model of 400 pieces, with its report."""
    return train_once(tmp_path_factory, prose, TrainerSettings(400, sample_bytes=50_000))


@pytest.fixture(scope="session")
def unigram_model(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a unigram model of 600 pieces, with its report."""
    return train_once(tmp_path_factory, prose, TrainerSettings(600, "unigram", 100_000))


def train_once(factory: pytest.TempPathFactory, corpus: Path, settings: TrainerSettings) -> Path:
    with shared_directory(factory, f"other-{settings.model_type}") as (root, complete):
        if not complete:
            train_tokenizer(find_inputs([corpus]).files, root / "other", settings, RecordKeys())
    return root / "other.model"


@pytest.fixture
def make_manifest(tmp_path: Path) -> MakeManifest:
    """A manifest over hand-made documents: [(split, source, unit, [ids, ...]), ...]; eod is 2."""

    def make(specs: list[ShardSpec]) -> Manifest:
        directory = tmp_path / "hand-made"
        directory.mkdir()
        shards = []
        for split, source, unit, documents in specs:
            writer = ShardWriter(directory / shard_name("hand", split, source, unit), "uint16")
            write_documents(writer, [np.array(ids, dtype=np.int32) for ids in documents])
            identity = {
                "name": writer.prefix.name,
                "number": unit,
                "split": split,
                "source": source,
            }
            parts = {
                "text_bytes": 4 * sum(map(len, documents)),
                "units": (unit,),
                "unit_documents": (len(documents),),
            }
            shards.append(Shard(**identity, **parts, **writer.finish()))
        return manifest_of(directory, shards, vocab_size=60_000)

    return make
