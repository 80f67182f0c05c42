"""BERT from a directory of Hugging Face, offline; unsuitable directories are refused with one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers import PreTrainedTokenizerBase as TokenizerBase

from pretrain.errors import UserError
from pretrain.finetuning.classification_data import Example
from pretrain.finetuning.encoding import Encoded

TOKENIZERS = ("tokenizer.json", "vocab.txt")
_NEW = ("bert.pooler.", "classifier.")
"""Tensors that a pretrained BERT may lack: they are made anew, by the seed of the fine-tuning."""


@dataclass(frozen=True)
class BertDirectory:
    """Configuration and tokenizer of a BERT, the same for all fine-tunings."""

    path: Path
    config: BertConfig
    tokenizer: TokenizerBase

    def classifier(self) -> tuple[BertForSequenceClassification, list[str]]:
        """Load the model with a classifier of two labels in float32; also return the names of new tensors.

        Raises UserError: the weights cannot be read, or lack more than pooler and classifier.
        """
        options: Any = {"num_labels": 2, "dtype": torch.float32, "use_safetensors": True}
        with _reading(self.path, "its weights"):
            loaded: Any = BertForSequenceClassification.from_pretrained(
                self.path, **options, local_files_only=True, output_loading_info=True
            )
        model, info = loaded
        made = sorted([*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])])
        if missing := [name for name in made if not name.startswith(_NEW)]:
            raise UserError(
                f"--model {self.path} lacks {missing[0]} ({len(missing)} tensors in all): its weights are "
                "not those of a BERT of its config.json"
            )
        return model, made

    def encode(self, examples: Sequence[Example], longest: int) -> Encoded:
        """Encode each sentence as [CLS] sentence [SEP], cut to `longest` ids."""
        sentences = [example.first for example in examples]
        whole = self.tokenizer(sentences, truncation=False, verbose=False)["input_ids"]
        cut = self.tokenizer(sentences, truncation=True, max_length=longest)["input_ids"]
        items = [{"input_ids": ids, "labels": e.label} for ids, e in zip(cut, examples, strict=True)]
        return Encoded(items, sum(len(ids) > longest for ids in whole))


def open_bert(path: Path, longest: int) -> BertDirectory:
    """Judge the directory by its small files.

    `longest`: ids of an example that it has to have positions for. Raises UserError: no directory, not of a
    BERT, without a tokenizer, or with too few positions.
    """
    if not path.is_dir():
        raise UserError(
            f"--model {path} is not a directory; download one, or make one with benchmarks/bert_small.py"
        )
    if not any((path / name).is_file() for name in TOKENIZERS):
        raise UserError(f"--model {path} has no tokenizer: none of {', '.join(TOKENIZERS)}")
    with _reading(path, "config.json or tokenizer"):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if config.model_type != "bert":
        raise UserError(
            f"--model {path} holds a model of type '{config.model_type}', not 'bert'; this test is of BERT's "
            "layers"
        )
    if len(tokenizer) > config.vocab_size or tokenizer.pad_token_id is None:
        raise UserError(
            f"--model {path}: its tokenizer has {len(tokenizer)} pieces for the {config.vocab_size} of its "
            "config.json, or no padding; use the tokenizer that the model was trained with"
        )
    if longest > config.max_position_embeddings:
        raise UserError(
            f"--max-length {longest} is more than the {config.max_position_embeddings} positions of {path}"
        )
    return BertDirectory(path, config, tokenizer)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors, the unpickler and tokenizers raise their own
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"--model {path}: {what} cannot be read: {line}") from error
