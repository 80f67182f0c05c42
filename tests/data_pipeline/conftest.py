"""One small corpus, tokenizer and shard directory for all tests of the package; real text from this Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.demo_corpus import build_corpus
from data_pipeline.manifest import FORMAT_VERSION, Manifest, Shard, from_dict
from data_pipeline.pool import Progress
from data_pipeline.shards import ShardWriter, shard_name
from data_pipeline.sources import RecordKeys, find_inputs
from data_pipeline.tokenize import TokenizeOptions, tokenize
from data_pipeline.tokenizer import TokenizerIdentity, TrainerSettings, train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]


def quiet(progress: Progress) -> None:
    """A reporter that shows nothing."""


@dataclass(frozen=True)
class Workshop:
    """What the fixtures made: a corpus of 8 files, a tokenizer of 1,000 pieces, the shards of all files."""

    corpus: Path
    model: Path
    shards: Path

    def tokenize(self, out: Path, files: slice = slice(None), workers: int = 1) -> tuple[Manifest, int]:
        """Tokenise some of the corpus files."""
        options = TokenizeOptions(name="small")
        return tokenize(find_inputs([self.corpus])[files], self.model, out, options, workers, quiet)


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


@dataclass(frozen=True)
class Outcome:
    """How a command line ended."""

    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one error sentence, after checking that the command ended as a user's error should."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        lines = self.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        return lines[0]


def run(*arguments: str | Path) -> Outcome:
    """`python -m data_pipeline ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-m", "data_pipeline", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    return Outcome(done.returncode, done.stdout, done.stderr)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory: its bytes by its relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


ShardSpec = tuple[str, str, int, list[list[int]]]
MakeManifest = Callable[[list[ShardSpec]], Manifest]


@pytest.fixture
def make_manifest(tmp_path: Path) -> MakeManifest:
    """A manifest over hand-made documents: [(split, source, unit, [ids of a document, ...]), ...]; eod is 2."""

    def make(specs: list[ShardSpec]) -> Manifest:
        directory = tmp_path / "hand-made"
        directory.mkdir()
        shards = []
        for split, source, unit, documents in specs:
            writer = ShardWriter(directory / shard_name("hand", split, source, unit), "uint16")
            writer.add([np.array(ids, dtype=np.int32) for ids in documents], 2, 0)
            identity = {"name": writer.prefix.name, "unit": unit, "split": split, "source": source}
            shards.append(from_dict(Shard, identity | writer.finish()))
        tokenizer = TokenizerIdentity("x.model", "0" * 64, 60_000, "unigram", 0, 1, 2, -1, 2)
        return Manifest(directory, FORMAT_VERSION, "hand", tokenizer, "uint16", {}, (), tuple(shards), 0)

    return make
