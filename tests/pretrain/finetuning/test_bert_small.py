"""evaluate bert-small: which source a sentence is from, and a small BERT that learns of the text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from data_pipeline.demo_corpus import build_corpus
from data_pipeline.sources.records import Document
from pretrain.__main__ import main
from pretrain.errors import UserError
from pretrain.finetuning.bert.directory import open_bert
from pretrain.finetuning.bert.sentences import Text, make_task, read_text, sentences


def test_sentences_are_plain_words_up_to_a_full_stop() -> None:
    document = (
        "Return the number of bytes that were read. Is this one a question that counts?\n"
        "Too short, this. The value of x_1 is not made of plain words alone.\n"
        "It ends, of course, with a well-known sign. And the last one is not ended"
    )
    assert list(sentences(document)) == [
        "Return the number of bytes that were read.",
        "It ends, of course, with a well-known sign.",
    ]


def documents(texts: str, source: str) -> tuple[Document, ...]:
    return tuple(Document(text, source, "") for text in texts.split("\n"))


def test_both_labels_are_equally_frequent_and_no_sentence_is_on_both_sides() -> None:
    shared = "This sentence stands on both of the sides."
    both = "This one was written for two sources."
    comments = "A comment is to be found here.\nAnother comment is here.\nThis comment is one too many."
    text = Text(
        documents(f"{shared}\nA first sentence of the manual here.\n{both}", "manual")
        + documents(f"{comments}\n{both}", "code")
        + documents("Only one sentence is from this place.", "elsewhere"),
        documents(f"{shared}\nThe manual has one more sentence.", "manual")
        + documents("One more comment is held out.", "code"),
    )
    task = make_task(text)
    assert set(task.sources) == {"manual", "code"}
    label = {source: number for number, source in enumerate(task.sources)}
    assert sorted(example.label for example in task.training) == [0, 0, 1, 1]
    assert sorted(example.label for example in task.validation) == [0, 1]
    found = {example.sentence: example.label for example in (*task.training, *task.validation)}
    assert found["A first sentence of the manual here."] == found[shared] == label["manual"]
    assert both not in found and "Only one sentence is from this place." not in found
    assert not {e.sentence for e in task.training} & {e.sentence for e in task.validation}


def test_text_of_one_source_is_refused() -> None:
    one = documents("A first sentence of the manual here.\nAnother one is here as well.", "manual")
    with pytest.raises(UserError, match=r"sentences of 1 sources \(manual\)"):
        make_task(Text(one, one[:1]))


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One document cannot be on both sides.")
    with pytest.raises(UserError, match="only 1 documents"):
        read_text(tmp_path)


def test_a_small_bert_learns_and_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_corpus(tmp_path / "corpus", 8)
    part = tmp_path / "corpus/demo-00000.jsonl.zst"
    sizes = "--hidden-size 32 --num-layers 1 --heads 2 --vocab-size 800 --sequence-length 24 --batch-size 16"
    for name in ("first", "second"):
        words = [str(part), "--out", str(tmp_path / name), *sizes.split(), "--steps", "60"]
        monkeypatch.setattr(sys, "argv", ["pretrain", "evaluate", "bert-small", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
    first, second = tmp_path / "first", tmp_path / "second"
    names = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    assert [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []
    found = json.loads((first / "pretraining.json").read_text())
    assert found["loss"] < 0.95 * found["loss_untrained"]
    model, made_anew = open_bert(first / "model", 24).classifier()
    assert len(made_anew) == 4 and model.dtype == torch.float32
    assert "held-out loss" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "exists already" in capsys.readouterr().err
