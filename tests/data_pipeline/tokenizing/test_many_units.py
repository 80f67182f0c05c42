"""More units than descriptors: tokenised, checked, and trained from under a small limit of them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources.discovery import find_inputs
from data_pipeline.tokenizing.plan import TokenizeOptions
from tests.data_pipeline.helpers import REPOSITORY, Workshop, all_documents, quiet, tokenize

UNITS = 5000
DESCRIPTORS = 256


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def under_the_limit(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        preexec_fn=limited,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of many lines."""
    path = tmp_path_factory.mktemp("text") / "in.jsonl"
    documents = all_documents(workshop.corpus)
    with open(path, "w") as stream:
        for number in range(2 * UNITS):
            document = documents[number % len(documents)]
            record = {"text": document.text[:200], "meta": {"redpajama_set_name": document.source}}
            stream.write(json.dumps(record) + "\n")
    return path


@pytest.mark.distributed
def test_directories_of_many_shards_are_read_under_the_limit(
    workshop: Workshop, text: Path, tmp_path: Path
) -> None:
    """Make one shard for every unit, split and source: 1,400 at a limit of 256."""
    options = TokenizeOptions("x", 0.2, range_bytes=text.stat().st_size // 700, shard_bytes=1)
    manifest, _ = tokenize(
        find_inputs([text]).files, workshop.model, tmp_path / "out", options, 4, quiet
    )
    assert len(manifest.shards) > 1400
    said = under_the_limit(
        "tests.data_pipeline.tokenizing.many_units", tmp_path / "out", tmp_path / "cache"
    )
    assert all(int(line.split()[1]) < 10 for line in said.splitlines()), said


@pytest.mark.distributed
@pytest.mark.parametrize("units", [DESCRIPTORS + 50, pytest.param(UNITS, marks=pytest.mark.full)])
def test_more_units_than_descriptors_are_tokenised_and_trained_from(
    units: int, workshop: Workshop, text: Path, tmp_path: Path
) -> None:
    shards, command = tmp_path / "shards", ["data_pipeline", "tokenize", text, "--name", "many"]
    command += [
        "--tokenizer",
        workshop.model,
        "--out",
        shards,
        "--workers",
        "2",
        "--validation-fraction",
        "0.2",
    ]
    under_the_limit(*command, "--range-bytes", text.stat().st_size // units)
    manifest = read_manifest(shards)
    assert len(manifest.inputs) > units and len(manifest.shards) == 6
    assert sorted(path.suffix for path in shards.iterdir()).count(".bin") == 6
    assert not (shards / "units").exists()
    assert "all as the manifest says" in under_the_limit("data_pipeline", "verify", shards)
    settings = {
        "run": {"name": "many", "directory": tmp_path / "runs"},
        "model": {"vocab_size": 1000, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
        "schedule": {"steps": 4, "warmup_steps": 1},
        "data": {
            "directory": shards,
            "sequence_length": 32,
            "validate_every": 2,
            "validation_samples": 8,
        },
        "checkpoint": {"every": 4},
    }
    changes = [
        f"{part}.{key}={value}" for part, of in settings.items() for key, value in of.items()
    ]
    under_the_limit("pretrain", "train", "demo", *changes, "--local-ranks", "2")
    summary = json.loads((tmp_path / "runs" / "many" / "summary.json").read_bytes())
    assert summary["step"] == 4, summary
