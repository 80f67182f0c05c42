"""Loading of exported models: as a classifier with a new head, or as a language model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from pretrain.errors import UserError
from pretrain.finetuning.classification_data import Task
from pretrain.finetuning.encoding import Ids
from pretrain.finetuning.pretrained import Pretrained

HEAD = "score"
"""The new head's weight, in Starcoder2 and GPT2."""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of an export.

    Attributes:
        start: id of a document's end, after which every text of the training began; batches are padded
            with the same id, for no text has it.
        longest: positions that the model was trained with.
    """

    program: Any
    start: int
    longest: int

    def ids(self, texts: list[str]) -> list[Ids]:
        ids: list[Ids] = self.program(texts, add_special_tokens=False)["input_ids"] if texts else []
        return ids

    def text(self, ids: Ids) -> str:
        return str(self.program.decode(ids, skip_special_tokens=True))


def load_tokenizer(pretrained: Pretrained) -> Tokenizer:
    """Load the model's tokenizer.

    Raises:
        UserError: transformers cannot load it, or it marks no end of a document.
    """
    directory = str(pretrained.directory)
    with _loading(pretrained):
        program = AutoTokenizer.from_pretrained(directory, trust_remote_code=pretrained.trusted)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=pretrained.trusted)
    start = program.bos_token_id if program.bos_token_id is not None else program.eos_token_id
    if start is None:
        raise UserError(f"{directory}: the tokenizer has neither bos_token nor eos_token; name one of them")
    if len(program) > config.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {len(program)} tokens, the model {config.vocab_size}: these two "
            "do not belong together"
        )
    return Tokenizer(program, int(start), int(config.max_position_embeddings))


def load_classifier(pretrained: Pretrained, task: Task, pad_id: int) -> nn.Module:
    """Load the model with a new head, drawn from torch's generator, in float32.

    Raises:
        UserError: transformers cannot load it, or has no classifier of that kind.
    """
    facts = {
        "num_labels": task.outputs,
        "problem_type": "single_label_classification" if task.labels else "regression",
        "pad_token_id": pad_id,
        "use_cache": False,
    }
    if list(pretrained.directory.glob("*.py")):
        model = _classifier_around(load_language_model(pretrained), facts)
    else:
        with _loading(pretrained):
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                str(pretrained.directory), dtype=torch.float32, output_loading_info=True, **facts
            )
        model, info = loaded
        if missing := sorted(name for name in info["missing_keys"] if not name.startswith(HEAD)):
            raise UserError(f"{pretrained.directory} has no weight {missing[0]}; export the run again")
    return _prepared(model)


def load_language_model(pretrained: Pretrained) -> Any:
    """Load the model as it was trained, in float32.

    Raises:
        UserError: transformers cannot load it.
    """
    with _loading(pretrained):
        model = AutoModelForCausalLM.from_pretrained(
            str(pretrained.directory), dtype=torch.float32, trust_remote_code=pretrained.trusted
        )
    return _prepared(model)


def _classifier_around(language_model: Any, facts: dict[str, Any]) -> Any:
    """Return a stock classifier around the body of a model whose own code subclasses a stock one."""
    stock: Any = type(language_model).__mro__[1]
    values = language_model.config.to_dict()
    for key in ("auto_map", "model_type", "architectures"):
        values.pop(key, None)
    config = stock.config_class(**{**values, **facts})
    classifier = AutoModelForSequenceClassification.from_config(config)
    body = language_model.base_model
    body.config.use_cache = False
    setattr(classifier, classifier.base_model_prefix, body)
    return classifier


def _prepared(model: Any) -> Any:
    """Let the embedding of the padding id train, and freeze the marks of heads that have a norm.

    The padding id also begins every text, and is not attended to where it pads. An export's own code marks a
    head that has a norm by a number among its weights, which transformers makes trainable on loading.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    for name, weight in model.named_parameters():
        if name.endswith(("_norm.normed", ".norm.normed")):
            weight.requires_grad_(False)
    return model


@contextmanager
def _loading(pretrained: Pretrained) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"transformers cannot load {pretrained.directory}: {reason}") from error
