"""Engines: the same ids whichever encodes, and a difference stops the run."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources.discovery import find_inputs
from data_pipeline.sources.records import Document
from data_pipeline.tokenizer import encoder
from data_pipeline.tokenizer.encoder import (
    Encoded,
    Encoder,
    GigatokenEncoder,
    open_encoder,
    why_not,
)
from data_pipeline.tokenizer.tokenizer import identify, load_tokenizer, open_tokenizer, read_model
from data_pipeline.tokenizing.encode_unit import UnitEncoder
from tests.data_pipeline.helpers import Workshop, all_documents, contents, run

pytest.importorskip("gigatoken")

RESERVED = ["a </s> b", "<s>", "<unk>", "x<unk>y", "<0x41>", "<0x0A>z"]
ODD = [
    "",
    " ",
    "\n",
    "\0",
    "a\0b",
    "\u2581",
    " \u2581 a",
    "<s",
    "naïve 数字 🙂 e\u0301",
    "x" * 5000,
    "é" * 3000,
]


def _texts(seed: int) -> list[str]:
    """Strings of few and repeated characters, where a tie of merges would show, and of any."""
    generator = random.Random(seed)
    alphabets = ["ab", " \n", " \tx\n", "=-*_", "the an in", "\"'()", "0123456789 "]
    runs = [character * count for character in "=-# ._\n0ab" for count in range(1, 40)]
    few = ["".join(generator.choices(alphabet, k=30)) for alphabet in alphabets for _ in range(100)]
    code_points = [*range(0x20, 0x500), *range(0x3000, 0x3100), *range(0x1F600, 0x1F640)]
    return (
        runs + few + ["".join(map(chr, generator.choices(code_points, k=30))) for _ in range(300)]
    )


@pytest.mark.distributed
def test_both_engines_make_the_same_ids(workshop: Workshop) -> None:
    texts = [d.text for d in all_documents(workshop.corpus)] + _texts(1) + RESERVED + ODD
    content = [text.encode() for text in texts]
    fast, slow = (open_encoder(workshop.model, name) for name in ("gigatoken", "sentencepiece"))
    assert fast.fast is not None and slow.fast is None
    expected = load_tokenizer(workshop.model).encode(texts, num_threads=1)
    for eod_id in (2, 77):
        batch, quick = fast.encode(content, eod_id)
        other, slow_quick = slow.encode(content, eod_id)
        assert any(quick) and not any(slow_quick)
        assert (batch.ids.dtype, batch.lengths.dtype) == (other.ids.dtype, other.lengths.dtype)
        triples = zip(texts, batch.documents(), other.documents(), strict=True)
        assert [text for text, a, b in triples if not np.array_equal(a, b)] == []
        assert np.array_equal(batch.ids, other.ids) and np.array_equal(batch.lengths, other.lengths)
        assert [ids.tolist() for ids in batch.documents()] == expected


def test_control_pieces_that_overlap_what_is_put_between_texts(
    workshop: Workshop, tmp_path: Path
) -> None:
    """With a control piece `x</s>` a text that ends in x loses it, and the piece behind it."""
    proto = read_model(workshop.model)
    assert [piece.piece for piece in proto.pieces[:3]] == ["<unk>", "<s>", "</s>"]
    texts = [b"one x", b"two", b"", b"x"]
    model = tmp_path / "edited.model"
    for pieces, between in ((("</s>", "x</s>"), b"</s>"), (("<<", "<s>"), b"<s>")):
        proto.pieces[1].piece, proto.pieces[2].piece = pieces
        proto.trainer_spec.eos_piece = between.decode()
        model.write_bytes(proto.SerializeToString())
        assert why_not(model) == ""
        fast = GigatokenEncoder(model)
        assert fast._between == between
        batch = fast.encode(texts, 9)
        expected = open_tokenizer(model).encode([text.decode() for text in texts])
        assert [ids.tolist() for ids in batch.documents()] == [ids.tolist() for ids in expected]
        assert batch.ids.tolist() == [i for ids in expected for i in [*ids.tolist(), 9]]
    proto.pieces[1].piece, proto.pieces[2].piece = "<<", "xx"
    model.write_bytes(proto.SerializeToString())
    assert "has no control token to put between documents" in why_not(model)


def test_texts_with_reserved_pieces_are_left_to_sentencepiece(workshop: Workshop) -> None:
    engine = open_encoder(workshop.model, "gigatoken")
    encoded, quick = engine.encode([*(text.encode() for text in RESERVED), b"plain <b>"], 2)
    assert quick == [False] * len(RESERVED) + [True]
    assert not any(ids.size and ids.min() < 3 for ids in encoded.documents())
    assert engine.fast is not None
    alone = engine.fast.encode([b"</s>"], 2).ids
    assert alone.tolist() == [2, 2], (
        "gigatoken has learned it: texts with reserved pieces may go to it"
    )


def test_the_memory_of_words_is_given_up(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_RENEW_AFTER", 100)
    text = b"the quick brown fox " * 3
    encoded = set()
    for most, kept in ((-(1 << 40), 1), (1 << 40, 5)):
        monkeypatch.setattr(encoder, "_MOST_MEMORY", most)
        fast = GigatokenEncoder(workshop.model)
        encoded |= {tuple(fast.encode([text, text], 2).ids.tolist()) for _ in range(5)}
        assert fast._bytes == kept * 2 * len(text + fast._between)
    assert len(encoded) == 1
    now = encoder._resident_bytes()
    assert now is None or 10 << 20 < now < 100 << 30


def test_the_shards_are_the_same_and_the_manifest_says_what_made_them(
    workshop: Workshop, tmp_path: Path
) -> None:
    lines = [
        {"text": text} for text in [*RESERVED, *(f"document {n} of many" for n in range(1500))]
    ]
    corpus = tmp_path / "in" / "x.jsonl"
    corpus.parent.mkdir()
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for engine in ("auto", "gigatoken", "sentencepiece"):
        done = run(*workshop.command(tmp_path / engine, "--engine", engine, corpus=corpus))
        assert (done.code, done.err) == (0, ""), done.err
    files_by_engine = {
        name: contents(tmp_path / name) for name in ("auto", "gigatoken", "sentencepiece")
    }
    assert files_by_engine["auto"] == files_by_engine["gigatoken"]
    for name in files_by_engine["auto"].keys() - {"manifest.json"}:
        assert files_by_engine["auto"][name] == files_by_engine["sentencepiece"][name], name
    said = read_manifest(tmp_path / "auto").encoding
    (fast, slow) = said["engines"].items()
    assert fast[0].startswith("gigatoken ") and fast[1] == 1500
    assert slow[0].startswith("sentencepiece ") and slow[1] == len(RESERVED)
    assert said["compared_documents"] >= 2 and said["lossy_documents"] == 0
    assert read_manifest(tmp_path / "sentencepiece").encoding["engines"] == {slow[0]: len(lines)}
    assert run("verify", tmp_path / "auto").code == 0


class _Wrong(GigatokenEncoder):
    """As a version with a mistake in it would be: right but for texts with a certain word."""

    def encode(self, texts: list[bytes], eod_id: int) -> Encoded:
        documents = super().encode(texts, eod_id).documents()
        wrong_documents = [
            ids[:-1] if b"wrong" in text else ids
            for text, ids in zip(texts, documents, strict=True)
        ]
        return Encoded.of(wrong_documents, eod_id)


def test_a_difference_stops_the_unit(workshop: Workshop) -> None:
    engine = Encoder(open_tokenizer(workshop.model), _Wrong(workshop.model))
    documents = [Document(f"right {n}", "a", f"f:{n}") for n in range(10)]

    def encode(batch: list[Document]) -> None:
        checked = UnitEncoder(engine, identify(workshop.model), allow_lossy=False)
        checked.encode(batch, [document.text.encode() for document in batch])

    encode(documents)
    for batch in (
        [*documents, Document("wrong", "b", "f:11")],  # the first of a source
        # The first that gigatoken is given.
        [Document("</s>", "a", "f:0"), Document("wrong", "a", "f:1")],
        [Document("wrong " * 40_000, "a", "f:0")],  # too long to be compared whole
        [*documents * 100, Document("wrong", "a", "f:1000")],  # one of the sample
    ):
        with pytest.raises(
            DataError, match=r"f:\d+: gigatoken .* and sentencepiece .* make different ids"
        ):
            encode(batch)


def test_what_gigatoken_cannot_do(
    workshop: Workshop, unigram_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = find_inputs([workshop.corpus]).files[0].path
    arguments = ("tokenize", corpus, "--name", "x", "--out", tmp_path / "out", "--tokenizer")
    refused = run(*arguments, unigram_model, "--engine", "gigatoken")
    assert "other.model is a unigram model, not BPE; leave --engine out" in refused.sentence()
    assert (
        "--engine 'fast' is unknown"
        in run(*arguments, workshop.model, "--engine", "fast").sentence()
    )
    assert not (tmp_path / "out").exists()
    done = run(*arguments, unigram_model)
    assert done.code == 0 and "not encoded by gigatoken: " in done.out
    monkeypatch.setitem(sys.modules, "gigatoken._load.sentencepiece", None)
    refused = run(*arguments, workshop.model, "--engine", "gigatoken")
    assert "gigatoken cannot be imported" in refused.sentence()
    assert open_encoder(workshop.model).fast is None
