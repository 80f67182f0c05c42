"""A small BERT and a test of its sentences, from your own text, offline: input of `evaluate bert-reservoir`.

    python -m benchmarks.bert_small demo/corpus --out demo/bert

`model/` has a WordPiece tokenizer and a BERT pretrained on masked language modelling (Devlin et al., NAACL
2019) without next-sentence prediction. `train.jsonl` and `validation.jsonl` ask which of the two largest
sources of the text a sentence is from; both labels are equally frequent. One document in six is held out of
the tokenizer, the pretraining and the training sentences, and no sentence is on both sides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import Document, read_documents

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HELD_OUT_ONE_IN = 6
HIDDEN_SIZE, NUM_LAYERS, HEADS, VOCABULARY, LENGTH = 64, 4, 4, 4000, 48
BATCH_SIZE, LEARNING_RATE, SEED = 32, 2e-3, 1
WORDS_OF_A_SENTENCE = range(5, 31)
_BEGIN, _INSIDE = "▁", "##"
"""First letter of a word while the vocabulary is made, and of a piece inside a word in WordPiece."""
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_PLAIN = re.compile(r"[A-Za-z]+(?:[-'][A-Za-z]+)*[,;:]?")


def read_text(corpus: Path) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and the held-out ones."""
    sides: tuple[list[Document], list[Document]] = ([], [])
    for file in find_inputs([corpus]):
        for document in read_documents(file.whole, RecordKeys()):
            sides[_hash(document.text) % HELD_OUT_ONE_IN == 0].append(document)
    return sides


def sentences(text: str) -> Iterator[str]:
    """Yield sentences of plain words that end in a full stop, white space made single spaces."""
    for paragraph in text.split("\n\n"):
        for sentence in _END.split(" ".join(paragraph.split())):
            words = sentence.removesuffix(".").split(" ")
            begins_and_ends = sentence[:1].isupper() and sentence.endswith(".")
            if begins_and_ends and len(words) in WORDS_OF_A_SENTENCE and all(map(_PLAIN.fullmatch, words)):
                yield sentence


def examples_of(training: Sequence[Document], held_out: Sequence[Document]) -> list[list[dict[str, Any]]]:
    """Return the examples of both sides in the order of their hashes, half of them of each source."""
    sides = [_by_sentence(training), _by_sentence(held_out)]
    sides[1] = {sentence: source for sentence, source in sides[1].items() if sentence not in sides[0]}
    counts = Counter(sides[0].values())
    sources = sorted(sorted(counts), key=lambda source: -counts[source])[:2]
    if len(sources) < 2:
        raise SystemExit(f"error: the text has sentences of {len(counts)} sources: give text of two or more")
    examples = []
    for side in sides:
        ordered = sorted(side, key=_hash)
        own = [[sentence for sentence in ordered if side[sentence] == source] for source in sources]
        pairs = list(zip(*own, strict=False))  # as many of each source
        rows = [{"sentence": s, "label": label} for pair in pairs for label, s in enumerate(pair)]
        examples.append(sorted(rows, key=lambda row: _hash(row["sentence"])))
    return examples


def _by_sentence(documents: Sequence[Document]) -> dict[str, str]:
    """Return {sentence: its source}; a sentence of several sources is left out."""
    sources: dict[str, set[str]] = {}
    for document in documents:
        for sentence in sentences(document.text):
            sources.setdefault(sentence, set()).add(document.source)
    return {sentence: min(own) for sentence, own in sources.items() if len(own) == 1}


def train_tokenizer(texts: Sequence[str]) -> BertTokenizer:
    """Return a WordPiece tokenizer in lower case, the same each time.

    The vocabulary is that of a BPE of words that begin with a sign of their own: the WordPiece trainer of
    `tokenizers` breaks ties by a hash that differs from process to process.
    """
    normal, cut = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = (
        " ".join(_BEGIN + word for word, _ in cut.pre_tokenize_str(normal.normalize_str(text)))
        for text in texts
    )
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    ranked = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)
    letters = sorted({letter for piece in ranked for letter in piece} - {_BEGIN})
    pieces = [*SPECIAL, *letters, *(_INSIDE + letter for letter in letters)]
    pieces += [piece[1:] if piece[0] == _BEGIN else _INSIDE + piece for piece in ranked if piece != _BEGIN]
    vocabulary = {piece: number for number, piece in enumerate(list(dict.fromkeys(pieces))[:VOCABULARY])}
    return BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=LENGTH)


def blocks_of(documents: Sequence[Document], tokenizer: BertTokenizer) -> list[dict[str, Any]]:
    """Return blocks of LENGTH ids: [CLS], pieces of the documents one after the other, [SEP]."""
    texts = [document.text for document in documents]
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    ids = [piece for text in encoded for piece in text]
    inside, cls, sep = LENGTH - 2, tokenizer.cls_token_id, tokenizer.sep_token_id
    starts = range(0, len(ids) - inside + 1, inside)
    return [{"input_ids": [cls, *ids[start : start + inside], sep]} for start in starts]


def pretrain(
    tokenizer: BertTokenizer, training: list[Any], held_out: list[Any], steps: int
) -> tuple[Any, float]:
    """Return a pretrained model, and its held-out loss in nats a masked piece."""
    set_seed(SEED)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN_SIZE,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * HIDDEN_SIZE,
            max_position_embeddings=LENGTH,
        )
    )
    with tempfile.TemporaryDirectory() as nothing:
        arguments = TrainingArguments(
            output_dir=nothing,
            max_steps=steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="linear",
            warmup_steps=steps // 10,
            weight_decay=0.01,
            seed=SEED,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=SEED)
        trainer = Trainer(model, arguments, masking, training, held_out)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return model, trainer.evaluate()["eval_loss"]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def main() -> None:
    """Write the model and the examples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="text files, or a directory of them, as `tokenize` reads")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists already")
    training, held_out = read_text(options.corpus)
    examples = examples_of(training, held_out)
    tokenizer = train_tokenizer([document.text for document in training])
    blocks = [blocks_of(side, tokenizer) for side in (training, held_out)]
    model, loss = pretrain(tokenizer, *blocks, options.steps)
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    for name, side in zip(("train", "validation"), examples, strict=True):
        rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in side)
        (options.out / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    sizes = " and ".join(f"{len(side):,}" for side in examples)
    print(f"{model.num_parameters():,} parameters, held-out loss {loss:.3f} nats, {sizes} sentences")


if __name__ == "__main__":
    main()
