"""One corpus, tokenizer and shard directory for all tests of the package; real text from this Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.demo_corpus import build_corpus
from data_pipeline.shards.manifest import FORMAT_VERSION, Manifest, shard_from_json
from data_pipeline.shards.writing import ShardWriter, shard_name
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.tokenizer.identity import TokenizerIdentity
from data_pipeline.tokenizer.train import TrainerSettings, train_tokenizer
from tests.data_pipeline.helpers import MakeManifest, ShardSpec, Workshop, write_documents


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The session's corpus, tokenizer and shards; tests must not change them."""
    root = tmp_path_factory.mktemp("workshop")
    made = Workshop(root / "corpus", root / "small.model", root / "shards")
    build_corpus(made.corpus, 8)
    settings = TrainerSettings(vocab_size=1000, sample_bytes=400_000)
    train_tokenizer(find_inputs([made.corpus]), root / "small", settings, RecordKeys())
    made.tokenize(made.shards)
    return made


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
