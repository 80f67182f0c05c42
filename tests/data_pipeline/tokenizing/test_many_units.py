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
from tests.data_pipeline.helpers import REPOSITORY, Workshop, all_documents

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


def write_files(workshop: Workshop, directory: Path, count: int) -> Path:
    """Files of fourteen documents each."""
    documents = all_documents(workshop.corpus)
    directory.mkdir()
    for number in range(count):
        chosen = [documents[(14 * number + offset) % len(documents)] for offset in range(14)]
        records = [
            {"text": document.text[:200], "meta": {"redpajama_set_name": document.source}}
            for document in chosen
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{number:05d}.jsonl").write_text(lines)
    return directory


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("units", [DESCRIPTORS + 50, pytest.param(5000, marks=pytest.mark.full)])
def test_more_units_than_descriptors_are_tokenised_and_trained_from(
    units: int, workshop: Workshop, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    text = write_files(workshop, tmp_path / "in", units)
    options = ("--workers", "2", "--validation-fraction", "0.2")
    under_the_limit("data_pipeline", *workshop.command(shards, *options, corpus=text))
    manifest = read_manifest(shards)
    assert len(manifest.inputs) == units and len(manifest.shards) == 6
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
    command = ("pretrain", "train", "demo", *changes, "--local-ranks", "2")
    under_the_limit(*command)
    summary = json.loads((tmp_path / "runs" / "many" / "summary.json").read_bytes())
    assert summary["step"] == 4, summary
