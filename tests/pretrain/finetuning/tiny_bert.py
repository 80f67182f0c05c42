"""Tiny BERT with random weights that knows a few words, and examples as SST-2 has them."""

from __future__ import annotations

from pathlib import Path

import torch

from pretrain.export.packages import require_transformers

HEADS, HEAD_DIM, HIDDEN = 2, 8, 16
WORDS = {1: ["lovely", "brilliant", "moving", "funny"], 0: ["dreadful", "boring", "clumsy", "hollow"]}
THINGS = ["film", "story", "cast", "script", "scene", "ending"]


def reviews(count: int) -> list[tuple[str, int]]:
    """Return sentences with labels, each decided by one word."""
    examples = []
    for number in range(count):
        label = number % 2
        words = (THINGS[number % 6], WORDS[label][number // 2 % 4], THINGS[(number // 3 + 1) % 6])
        examples.append(("the {} is {} , the {} too".format(*words), label))
    return examples


def make_tiny_bert(room: Path) -> None:
    """Write ROOM/bert, ROOM/train.tsv and ROOM/validation.tsv."""
    require_transformers("the test")
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ",", "the", "is", "too"]
    pieces += [*WORDS[1], *WORDS[0], *THINGS]
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=16,
    )
    BertForMaskedLM(config).save_pretrained(room / "bert")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=16).save_pretrained(room / "bert")
    for name, count in (("train", 48), ("validation", 16)):
        lines = [f"{text}\t{label}\n" for text, label in reviews(count)]
        (room / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
