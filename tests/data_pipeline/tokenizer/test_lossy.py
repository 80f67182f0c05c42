"""Tokenizers that lose text are refused where they do, unless they are chosen deliberately."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.tokenizer.tokenizer import identify, open_tokenizer
from tests.data_pipeline.helpers import Workshop, all_documents, run, write_texts

pytestmark = pytest.mark.distributed  # trains a model for each test

_STRICT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
_KNOWN = "plain words of the corpus"
_UNKNOWN = "a snowman \u2603 is not"


def _train(workshop: Workshop, path: Path, **settings: Any) -> Path:
    """A model with other settings than train-tokenizer's."""
    lines = [line for d in all_documents(workshop.corpus)[:300] for line in d.text.split("\n")]
    with open(path, "wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=stream,
            vocab_size=500,
            minloglevel=2,
            **settings,
        )
    return path


def test_an_unknown_piece_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    model = _train(workshop, tmp_path / "u.model", **_STRICT, add_dummy_prefix=False)
    good = write_texts(tmp_path / "good.jsonl", [_KNOWN])
    bad = write_texts(tmp_path / "bad.jsonl", [_KNOWN, _UNKNOWN])
    arguments = ("--tokenizer", model, "--name", "x", "--validation-fraction", "0")
    assert run("tokenize", good, *arguments, "--out", tmp_path / "good").code == 0
    sentence = run("tokenize", bad, *arguments, "--out", tmp_path / "bad").sentence()
    assert "bad.jsonl:2: u.model loses text of this document: '\u2603 is not' becomes" in sentence
    assert "--allow-lossy" in sentence
    assert not list((tmp_path / "bad").rglob("*.ids")) and not list(
        (tmp_path / "bad").glob("*.bin")
    )
    done = run("tokenize", bad, *arguments, "--out", tmp_path / "lossy", "--allow-lossy")
    assert done.code == 0
    manifest = read_manifest(tmp_path / "lossy")
    assert manifest.options["allow_lossy"] and manifest.encoding["lossy_documents"] == 1
    verified = run("verify", tmp_path / "lossy")
    assert verified.code == 0 and "2 documents of 1 units are as in the source text" in verified.out


def test_a_model_that_rewrites_text(workshop: Workshop, tmp_path: Path) -> None:
    model = _train(workshop, tmp_path / "nfkc.model", byte_fallback=True)
    corpus = write_texts(tmp_path / "x.jsonl", ["two  spaces", "the word", "the \ufb01rst\nline"])
    arguments = ("tokenize", corpus, "--tokenizer", model, "--name", "x", "--out", tmp_path / "out")
    assert "changes the text (normalisation 'nmt_nfkc', " in run(*arguments).sentence()
    assert run(*arguments, "--allow-lossy").code == 0
    assert read_manifest(tmp_path / "out").encoding["lossy_documents"] == 2
    verified = run("verify", tmp_path / "out")
    assert verified.code == 0 and "3 documents of 1 units are as in the source text" in verified.out


def test_a_dummy_prefix_loses_nothing(workshop: Workshop, tmp_path: Path) -> None:
    # As Llama's model has it.
    model = _train(workshop, tmp_path / "p.model", **_STRICT, byte_fallback=True, model_type="bpe")
    assert open_tokenizer(model).lossless
    texts = [_KNOWN, " a space before", "\ntwo  spaces ", _UNKNOWN]
    corpus = write_texts(tmp_path / "x.jsonl", texts)
    done = run("tokenize", corpus, "--tokenizer", model, "--name", "x", "--out", tmp_path / "out")
    assert done.code == 0 and "puts a space before it" in done.out
    assert "4 documents of 1 units are as in the source text" in run("verify", tmp_path / "out").out


def test_a_dummy_suffix_is_kept_and_so_changes_the_text(workshop: Workshop, tmp_path: Path) -> None:
    suffix = {"treat_whitespace_as_suffix": True, "model_type": "bpe", "byte_fallback": True}
    model = _train(workshop, tmp_path / "s.model", **_STRICT, **suffix)
    assert not open_tokenizer(model).lossless
    corpus = write_texts(tmp_path / "x.jsonl", [_KNOWN])
    arguments = ("tokenize", corpus, "--tokenizer", model, "--name", "x", "--out", tmp_path / "out")
    assert "changes the text (normalisation 'identity', treat" in run(*arguments).sentence()


def test_a_tokenizer_json(workshop: Workshop, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    texts = [document.text for document in all_documents(workshop.corpus)[:300]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [_KNOWN, _UNKNOWN, "an <|end|> that is text", "two  spaces\n"]
    corpus = write_texts(tmp_path / "x.jsonl", texts)
    arguments = ("tokenize", corpus, "--tokenizer", tmp_path / "tokenizer.json", "--name", "x")
    assert "give --eod-token" in run(*arguments, "--out", tmp_path / "out").sentence()
    refusal = run(*arguments, "--out", tmp_path / "out", "--eod-token", "<|no|>").sentence()
    assert "--eod-token '<|no|>' is not a token of" in refusal
    done = run(*arguments, "--out", tmp_path / "out", "--eod-token", "<|end|>")
    assert done.code == 0, done.err
    manifest = read_manifest(tmp_path / "out")
    assert manifest.tokenizer.model_type == "huggingface" and manifest.tokenizer.eod_id == 0
    assert manifest.tokenizer_path.name == "tokenizer.json" and manifest.tokenizer_path.is_file()
    assert list(manifest.encoding["engines"]) == [f"tokenizers {tokenizers.__version__}"]
    verified = run("verify", tmp_path / "out")
    assert verified.code == 0 and "documents of 1 units are as in the source text" in verified.out
    # What its configuration names needs no option.
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}})
    )
    assert identify(tmp_path / "tokenizer.json").eod_id == 0
    # One that loses text is found out by its text.
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    (tmp_path / "lower").mkdir()
    tokenizer.save(str(tmp_path / "lower" / "tokenizer.json"))
    bad = write_texts(tmp_path / "bad.jsonl", ["fine", "Not fine"])
    lower = ("tokenize", bad, "--tokenizer", tmp_path / "lower" / "tokenizer.json", "--name", "x")
    lower += ("--eod-token", "<|end|>", "--out", tmp_path / "lossy")
    assert "'Not fine' becomes 'not fine'" in run(*lower).sentence()
    assert "leave --engine out" in run(*lower, "--engine", "sentencepiece").sentence()


def test_junk_in_place_of_a_tokenizer_json(workshop: Workshop, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    corpus = write_texts(tmp_path / "x.jsonl", [_KNOWN])
    arguments = ("tokenize", corpus, "--tokenizer", tmp_path / "tokenizer.json", "--name", "x")
    done = run(*arguments, "--out", tmp_path / "out", "--eod-token", "x")
    assert "is not a Hugging Face tokenizer.json" in done.sentence()
