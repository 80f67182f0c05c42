"""benchmarks.bert_small: sentences and their sources, and a small BERT that learns from the text."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from data_pipeline.demo_corpus import build_corpus
from data_pipeline.sources.records import Document

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed


def documents(texts: str, source: str) -> list[Document]:
    return [Document(text, source, "") for text in texts.split("\n")]


def test_sentences_are_plain_words_up_to_a_full_stop() -> None:
    from benchmarks.bert_small import sentences

    document = (
        "Return the number of bytes that were read. Is this one a question that counts?\n"
        "Too short, this. The value of x_1 is not made of plain words alone.\n"
        "It ends, of course, with a well-known sign. And the last one is not ended"
    )
    assert list(sentences(document)) == [
        "Return the number of bytes that were read.",
        "It ends, of course, with a well-known sign.",
    ]


def test_both_labels_are_equally_frequent_and_no_sentence_is_on_both_sides() -> None:
    from benchmarks.bert_small import examples_of

    shared = "This sentence stands on both of the sides."
    both = "This one was written for two sources."
    comments = "A comment is to be found here.\nAnother comment is here.\nThis comment is one too many."
    training = documents(f"{shared}\nA first sentence of the manual here.\n{both}", "manual")
    training += documents(f"{comments}\n{both}", "code")
    training += documents("Only one sentence is from this place.", "elsewhere")
    held_out = documents(f"{shared}\nThe manual has one more sentence.", "manual")
    held_out += documents("One more comment is held out.", "code")
    sides = examples_of(training, held_out)
    assert [Counter(example["label"] for example in side) for side in sides] == [{0: 2, 1: 2}, {0: 1, 1: 1}]
    label = {example["sentence"]: example["label"] for side in sides for example in side}
    assert label["A first sentence of the manual here."] == label[shared]
    assert (
        label["The manual has one more sentence."] == label[shared] != label["One more comment is held out."]
    )
    assert both not in label and "Only one sentence is from this place." not in label
    assert len(label) == 6
    with pytest.raises(SystemExit, match="sentences of 1 sources"):
        examples_of(held_out[:2], held_out)


def test_a_small_bert_learns_and_can_be_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import bert_small
    from pretrain.finetuning.bert.directory import open_bert

    build_corpus(tmp_path / "corpus", 8)
    for name, value in {
        "HIDDEN_SIZE": 32,
        "NUM_LAYERS": 1,
        "HEADS": 2,
        "VOCABULARY": 800,
        "LENGTH": 24,
    }.items():
        monkeypatch.setattr(bert_small, name, value)
    part, out = tmp_path / "corpus/demo-00000.jsonl.zst", tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["bert_small", str(part), "--out", str(out), "--steps", "60"])
    bert_small.main()
    said = capsys.readouterr().out
    assert float(said.partition("held-out loss ")[2].split()[0]) < 6.35  # 95 % of ln 800
    bert = open_bert(out / "model", 24)
    _, made_anew = bert.classifier()
    assert len(made_anew) == 4 and bert.config.num_hidden_layers == 1
    for name in ("train", "validation"):
        rows = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) > 10 and sum(row["label"] for row in rows) * 2 == len(rows)
    with pytest.raises(SystemExit):
        bert_small.main()
    assert "exists already" in capsys.readouterr().err
