"""`try` on a small text, as a user gives it: from the pages of docs to a page of both models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, rank_environment

pytestmark = pytest.mark.distributed
PAGES = [str(path) for path in sorted((ROOT / "docs").glob("*.md"))]
SMALL = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "data.validation_samples": 8,
    "schedule.steps": 6,
    "schedule.warmup_steps": 2,
}


def test_texts_become_a_page_with_text_of_both_models(tmp_path: Path) -> None:
    options = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "pretrain", "try", *PAGES, *options]
    environment = rank_environment() | {"PYTHONPATH": str(ROOT)}

    def tried(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=550,
        )

    done = tried()
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[1] == "vanilla beside monarch_shared_conv:"
    assert said[2].startswith("2 layers of 32") and "6 steps" in said[2]
    assert said[-1] == "the page: trial/comparison/report.html"
    content = json.loads((tmp_path / "trial/comparison/comparison.json").read_text())
    names = [variant["name"] for variant in content["variants"]]
    assert names == ["vanilla", "monarch_shared_conv"]
    assert [text["variant"] for text in content["texts"]] == [
        name for name in names for _ in range(2)
    ]
    prompts = [text["prompt"] for text in content["texts"]]
    assert prompts[:2] == prompts[2:] and prompts[0] != prompts[1]
    page = (tmp_path / "trial/comparison/report.html").read_text()
    assert "Text of the models" in page and page.count("<svg") >= 3
    other = tried("--design", "orthogonal")
    assert other.returncode == 2 and other.stderr.startswith(
        "error: trial/sweep.yaml is of another"
    )
