"""Fixtures shared by the suite: shards of real text, made once by the real pipeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, rank_environment
from tests.tiny import VOCAB_SIZE


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own hook of this name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `pytest -n 2` a file stays with one process, for its fixtures, and so do all drills.

    The drills come first: they wait for Slurm most of the time, and the rest runs beside them.
    """
    drills = Path(__file__).parent / "slurm"
    items.sort(key=lambda item: not item.path.is_relative_to(drills))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        group = "slurm" if item.path.is_relative_to(drills) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


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
