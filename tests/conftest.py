"""Fixtures shared by the suite: shards of real text, made once by the real pipeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, rank_environment
from tests.tiny import VOCAB_SIZE


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard directory of the Python installation's own prose under a 512-piece tokenizer."""
    directory = tmp_path_factory.mktemp("data")
    data_pipeline("demo-corpus", directory / "corpus")
    return make_shards(directory)


def make_shards(directory: Path) -> Path:
    """Tokenizer and shards of `directory`/corpus, beside it."""
    data_pipeline(
        "train-tokenizer", directory / "corpus", "--out", directory / "tokenizer", "--vocab-size", VOCAB_SIZE
    )
    arguments = (
        "--tokenizer",
        directory / "tokenizer.model",
        "--out",
        directory / "shards",
        "--name",
        "tiny",
    )
    data_pipeline("tokenize", directory / "corpus", *arguments)
    return directory / "shards"


def data_pipeline(*arguments: object) -> None:
    """Run `python -m data_pipeline ARGUMENTS`."""
    command = [sys.executable, "-m", "data_pipeline", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=rank_environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
