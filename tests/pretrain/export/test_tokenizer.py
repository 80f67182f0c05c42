"""tokenizer.json from SentencePiece models: the same ids and texts, whatever is written."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, processors

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest, read_manifest
from data_pipeline.tokenizer.tokenizer import identify, open_tokenizer
from pretrain.errors import UserError
from pretrain.export.tokenizer import compare_tokenizers, write_tokenizer
from tests.conftest import data_pipeline
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.distributed  # trains tokenizers, seconds each

pytest.importorskip("transformers")

HOSTILE = (
    "",
    " ",
    "  two  spaces  ",
    "\n\n\ttabs\r\n",
    "</s> and <s> and <unk> and <0x41> written out",
    "naïve café, Привет, 你好, 👩‍👩‍👧, \u0000 \ufeff",
    "0123456789" * 30,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab" * 20,
    "def f(x):\n    return x  # " + "z" * 300,
)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def manifest(
    request: pytest.FixtureRequest, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    if request.param == "bpe":
        return read_manifest(tiny_shards)
    directory = tmp_path_factory.mktemp("unigram") / "shards"
    size = ("--vocab-size", VOCAB_SIZE, "--model-type", "unigram", "--sample-bytes", 300_000)
    corpus = tiny_shards.parent / "corpus"
    data_pipeline("train-tokenizer", corpus, "--out", directory.parent / "tokenizer", *size)
    shutil.copytree(tiny_shards, directory)  # whose ids it decodes to texts as good as any
    shutil.copy(directory.parent / "tokenizer.model", directory / "tokenizer.model")
    return replace(read_manifest(tiny_shards), directory=directory)


@pytest.fixture(scope="module")
def exported(manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(manifest, out, model_max_length=32)
    return out


def load(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def test_hostile_texts_have_the_ids_of_training(manifest: Manifest, exported: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(manifest.tokenizer_path))
    tokenizer = load(exported)
    for text in HOSTILE:
        ids = processor.encode(text)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text
        assert tokenizer.decode(ids) == processor.decode(ids) == text
    # And nothing is added.
    assert tokenizer("no </s> here")["input_ids"] == processor.encode("no </s> here")


def test_documents_end_and_begin_with_the_end_of_document(
    manifest: Manifest, exported: Path
) -> None:
    tokenizer = load(exported)
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == manifest.tokenizer.eod_id == 2
    assert len(tokenizer) == manifest.tokenizer.vocab_size and tokenizer.model_max_length == 32


def test_texts_of_different_lengths_make_a_batch(exported: Path) -> None:
    batch = load(exported)(["one", "one two three"], padding=True)
    short, long = (len(load(exported)(text)["input_ids"]) for text in ("one", "one two three"))
    assert batch["attention_mask"] == [[0] * (long - short) + [1] * short, [1] * long]
    assert batch["input_ids"][0][: long - short] == [2] * (long - short)


def test_held_out_text_is_compared(manifest: Manifest, exported: Path) -> None:
    comparison = compare_tokenizers([manifest], exported, custom=False)
    assert comparison.documents > 50 and comparison.tokens > 10_000
    assert comparison.different_ids == comparison.different_texts == 0
    assert not (exported / "tokenizer.model").exists()


def test_what_differs_is_counted_and_the_model_goes_along(
    manifest: Manifest, tmp_path: Path
) -> None:
    write_tokenizer(manifest, tmp_path, model_max_length=32)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    if content["model"]["type"] == "BPE":
        del content["model"]["merges"][:3]
    else:
        content["model"]["vocab"][300][1] = 0.0
    file.write_text(json.dumps(content))
    comparison = compare_tokenizers([manifest], tmp_path, custom=False)
    assert 0 < comparison.different_ids <= comparison.documents and comparison.different_texts == 0
    assert (tmp_path / "tokenizer.model").read_bytes() == manifest.tokenizer_path.read_bytes()


def test_a_tokenizer_json_goes_as_it_is(manifest: Manifest, exported: Path, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (stored / name).write_bytes((exported / name).read_bytes())
    same = replace(manifest, directory=stored, tokenizer=identify(stored / "tokenizer.json"))
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(same, out, model_max_length=32)
    assert (out / "tokenizer.json").read_bytes() == (stored / "tokenizer.json").read_bytes()
    assert load(out).eos_token == "</s>"


def test_what_training_switches_off_in_a_tokenizer_json_is_off_in_the_export(
    exported: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    """Tokens in front and at the end, and a longest text; the comparison uses the defaults too."""
    stored = tmp_path / "stored"
    stored.mkdir()
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(stored / "tokenizer.json"))
    assert tokenizer.encode("a" * 40).ids[::7] == [1, 2]
    shutil.copy(exported / "tokenizer_config.json", stored)
    shutil.copytree(tiny_shards, tmp_path / "shards")
    shutil.copy(stored / "tokenizer.json", tmp_path / "shards")
    identity = identify(stored / "tokenizer.json")
    trained = replace(read_manifest(tiny_shards), directory=tmp_path / "shards", tokenizer=identity)
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(trained, out, model_max_length=32)
    ids = open_tokenizer(trained.tokenizer_path).encode(["a" * 40])[0].tolist()
    assert load(out)("a" * 40)["input_ids"] == ids and len(ids) > 8
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("a" * 40).ids == ids
    comparison = compare_tokenizers([trained], out, custom=False)
    assert comparison.documents > 50 and comparison.different_ids == comparison.different_texts == 0
    shutil.copy(stored / "tokenizer.json", out)
    assert compare_tokenizers([trained], out, custom=False).different_ids == comparison.documents


def test_models_of_other_kinds_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    words = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four five six"] * 9),
        model_writer=words,
        model_type="word",
        vocab_size=9,
        minloglevel=2,
    )
    other = replace(manifest, directory=tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(words.getvalue())
    with pytest.raises(UserError, match=r"is a word model, which tokenizer\.json cannot hold"):
        write_tokenizer(other, tmp_path, model_max_length=32)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        write_tokenizer(other, tmp_path, model_max_length=32)
