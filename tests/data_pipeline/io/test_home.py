"""Paths that begin with ~, in every argument and option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipeline.io.home import expand_home
from tests.data_pipeline.helpers import Workshop, run


def test_a_path_that_begins_with_a_tilde_is_below_the_home_directory(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert expand_home("~/a") == tmp_path / "a" and expand_home("a/~") == Path("a/~")
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    (tmp_path / "small.model").write_bytes(workshop.model.read_bytes())
    tokenized = run(
        "tokenize", "~/in.jsonl", "--tokenizer=~/small.model", "--out=~/out", "--name=a"
    )
    assert tokenized.code == 0, tokenized.err
    checked = run("verify", "~/out", "--inputs=~/")
    assert checked.code == 0 and "1 documents of 1 units are as in the source text" in checked.out
    assert not (tmp_path / "~").exists()
    refused = run("tokenize", "~/", "--tokenizer=~/small.model", "--out=~/out", "--name=a")
    assert "lies inside the input directory" in refused.sentence()
