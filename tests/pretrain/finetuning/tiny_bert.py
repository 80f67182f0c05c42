"""A BERT of random weights that knows a few words, and examples as SST-2 has them."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.sources.records import Document
from pretrain.export.packages import require_transformers
from pretrain.finetuning.bert.small import SmallBert, new_model, save_bert, train_tokenizer

HEADS, HEAD_DIM, HIDDEN = 2, 8, 16
WORDS = {1: ["lovely", "brilliant", "moving", "funny"], 0: ["dreadful", "boring", "clumsy", "hollow"]}
THINGS = ["film", "story", "cast", "script", "scene", "ending"]


def reviews(count: int) -> list[tuple[str, int]]:
    """Sentences whose label one word tells."""
    found = []
    for number in range(count):
        label = number % 2
        words = (THINGS[number % 6], WORDS[label][number // 2 % 4], THINGS[(number // 3 + 1) % 6])
        found.append(("the {} is {} , the {} too".format(*words), label))
    return found


def make_tiny_bert(room: Path) -> None:
    """ROOM/bert, ROOM/train.tsv and ROOM/validation.tsv."""
    require_transformers("the test")
    settings = SmallBert(HIDDEN, 2, HEADS, vocab_size=120, sequence_length=16)
    tokenizer = train_tokenizer(tuple(Document(text, "reviews", "") for text, _ in reviews(48)), settings)
    save_bert(room / "bert", new_model(len(tokenizer), settings), tokenizer)
    for name, count in (("train", 48), ("validation", 16)):
        lines = [f"{text}\t{label}\n" for text, label in reviews(count)]
        (room / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
