"""The command line: the demo's commands, and one sentence for a user's mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from data_pipeline.io.files import LFS_POINTER
from tests.data_pipeline.helpers import Workshop, run


def test_help_of_every_verb_has_an_example() -> None:
    verbs = "demo-corpus download train-tokenizer tokenize merge-manifests verify stats"
    for verb in verbs.split():
        words = " ".join(run(verb, "--help").out.split())
        assert f"Example: python -m data_pipeline {verb}" in words
        if verb == "train-tokenizer":
            assert "[default: 32000]" in words and "[default: bpe]" in words


@pytest.mark.distributed
def test_the_demo_commands_and_again(workshop: Workshop, tmp_path: Path) -> None:
    train = ("train-tokenizer", workshop.corpus, "--out", tmp_path / "t", "--vocab-size", "600")
    shards = ("tokenize", workshop.corpus, "--tokenizer", tmp_path / "t.model", "--name", "demo")
    commands = [
        (*train, "--model-type", "bpe"),
        (*shards, "--out", tmp_path / "shards", "--workers", "2", "--files-per-shard", "4"),
    ]
    assert "already up to date" in run("demo-corpus", workshop.corpus).out
    for command in commands:
        first = run(*command)
        second = run(*command)
        assert first.code == 0 and "already up to date" not in first.out, first.err
        assert second.code == 0 and "already up to date" in second.out, second.err


TOKENIZE = "tokenize CORPUS --tokenizer MODEL --out TMP/out --name x"
MISTAKES = [
    ("stats TMP/absent", "TMP/absent does not exist"),
    ("verify TMP", "TMP has no manifest.json"),
    (TOKENIZE.replace("CORPUS", "TMP/absent.jsonl"), "TMP/absent.jsonl does not exist"),
    (TOKENIZE.replace("CORPUS", "TMP/bad.jsonl --strict"), "TMP/bad.jsonl:2: bad_json"),
    (f"{TOKENIZE} --num-tasks 4", "--num-tasks 4 needs --task"),
    (f"{TOKENIZE} --task 1", "--task 1 needs --num-tasks"),
    (f"{TOKENIZE} --task 4 --num-tasks 4", "--task 4 must be from 0 to 3"),
    (f"{TOKENIZE} --validation-fraction 0.6 --test-fraction 0.6", "more than 1 together"),
    ("merge-manifests TMP", "TMP has no plan.json"),
    (TOKENIZE.replace("MODEL", "TMP/no.model"), "TMP/no.model"),
    (TOKENIZE.replace("TMP/out", "TMP"), "TMP is not empty"),
    (f"{TOKENIZE} --name a/b", "--name 'a/b'"),
    (f"{TOKENIZE} --workers 0", "--workers 0"),
    ("merge-manifests TMP --workers 0", "--workers 0 must be at least 1"),
    (f"{TOKENIZE} --default-source=", "--default-source is empty; give the name"),
    (
        TOKENIZE.replace("CORPUS", "TMP/lfs.jsonl.zst"),
        "restore the damaged ones, the first is lfs.jsonl.zst: ",
    ),
    ("train-tokenizer TMP/lfs.jsonl.zst --out TMP/t", "; damaged is lfs.jsonl.zst: "),
    (f"{TOKENIZE} --default-source \udcff", "--default-source '\\udcff' is not valid UTF-8"),
    (f"verify TMP/{'long' * 70}", f"cannot use TMP/{'long' * 70}: File name too long"),
    ("train-tokenizer CORPUS --out TMP/t --vocab-size 500000", "--vocab-size 500000"),
    (
        "train-tokenizer CORPUS --out TMP/t --vocab-size 500 --model-type word",
        "--model-type 'word'",
    ),
    ("train-tokenizer CORPUS --out TMP/t --vocab-size -5", "--vocab-size -5 must be at least 1"),
    ("train-tokenizer CORPUS --out TMP/t --seed -1", "--seed -1 must be at least 0"),
    ("train-tokenizer CORPUS --out TMP/t --sample-bytes 0", "--sample-bytes 0 must be at least 1"),
    (
        "train-tokenizer CORPUS --out TMP/t --source Books",
        "left out are documents of PydocTopics, Stdlib",
    ),
    (
        "train-tokenizer TMP/bad.jsonl --out TMP/t --vocab-size 300",
        "not documents are 1 bad_json (first bad.jsonl line 2: ",
    ),
    (f"{TOKENIZE} --source Books", " of source PydocTopics, "),
    (f"{TOKENIZE} --source Books --exclude-source Books", "source 'Books' is given to both"),
    ("train-tokenizer CORPUS --out TMP/t --vocab-size 5000000000", "at least 1 and below 2^31"),
    ("train-tokenizer CORPUS --out .", "--out . is a directory; give the beginning of a file"),
    (
        "train-tokenizer CORPUS --out TMP/bad.jsonl/t",
        "--out TMP/bad.jsonl/t cannot be written: TMP/bad.jsonl is not a directory; name another",
    ),
    (f"{TOKENIZE} --eod-token a", "of text; choose another --eod-token, or another tokenizer"),
    (f"{TOKENIZE} --shard-bytes {2**63 - 1}", "must be at least 1 and below"),
    (f"{TOKENIZE} --max-reject-rate 2", "--max-reject-rate 2.0 must be from 0 to 1"),
    (TOKENIZE.replace("TMP/out", "TMP/bad.jsonl/out"), "cannot write TMP/bad.jsonl/out/plan.json"),
]


@pytest.mark.parametrize(("command", "expected"), MISTAKES)
def test_a_users_mistake_is_one_sentence(
    workshop: Workshop, tmp_path: Path, command: str, expected: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "good"}) + "\n{bad}\n")
    (tmp_path / "lfs.jsonl.zst").write_bytes(LFS_POINTER + b"v1\n")
    places = {"TMP": tmp_path, "MODEL": workshop.model, "CORPUS": workshop.corpus}

    def with_paths(text: str) -> str:
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    assert with_paths(expected) in run(*map(with_paths, command.split())).sentence()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_missing_package_is_one_sentence_that_names_its_extra(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    loaded = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(loaded, "s3", raising=False)  # by an earlier test
    command = workshop.command(tmp_path / "out", corpus="json:s3://bucket/a.jsonl")
    sentence = run(*command).sentence()
    assert "needs a package that is not installed" in sentence
    assert "pip install --constraint constraints.txt --editable '.[s3]'" in sentence
