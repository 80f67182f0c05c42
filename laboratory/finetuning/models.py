"""Models to fine-tune: exports of runs, or directories of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from laboratory.finetuning.classification_data import Task
from laboratory.finetuning.encoding import Ids
from laboratory.finetuning.frozen_rows import Rows
from laboratory.study.seeds import Groups, group_by_settings, method_of, refuse_twice
from pretrain.errors import UserError
from pretrain.export.models import (
    FACTS,
    loading,
    model_digest,
    read_language_model,
    read_tokenizer,
    refuse_missing,
    require_tokenizer,
    require_trust,
)
from pretrain.export.run_exports import exported
from pretrain.runs.facts import read_facts

HEAD = "score"
"""The new head's weight, in all classes of exports."""


@dataclass(frozen=True)
class Pretrained:
    """Model to fine-tune or to evaluate.

    Attributes:
        path: Path as the user gave it.
        directory: The export.
        facts: export.json; empty where it is somebody else's.
        digest: SHA-256 of weights, configuration and tokenizer.
        trusted: Whether code that lies in the directory may run.
        name: Name of the run, or of the directory.
    """

    path: Path
    directory: Path
    facts: Mapping[str, Any]
    digest: str
    trusted: bool
    name: str

    @property
    def seed(self) -> int | None:
        """Return the seed of the pretraining, where it is known."""
        return self.facts.get("seed")

    @property
    def step(self) -> int | None:
        """Return the step of the checkpoint, where it is known."""
        return self.facts.get("step")

    @property
    def frozen_rows(self) -> Rows:
        """Return the rows that were frozen when the pretraining ended."""
        return self.facts.get("frozen_rows", {})

    @property
    def variant(self) -> str:
        """Return the variant; of a model without export.json its name."""
        return str(self.facts.get("variant", self.name))

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the section `attention` of the run's configuration; empty where it is unknown."""
        return {"attention": self.facts.get("attention", {})}

    def settings(self) -> dict[str, Any]:
        """Return the settings, other than seeds, in which models of one method can differ."""
        facts = self.facts
        if not facts:
            return {}
        attention = {k: v for k, v in facts["attention"].items() if k not in ("seed", "adapters")}
        return {
            **attention,
            "model": facts["model"],
            "step": facts["step"],
            "trainable": facts["parameters"]["trainable"],
            "sequence_length": facts["sequence_length"],
            "data": facts["data"]["fingerprint"][:12],
        }


def open_pretrained(path: Path, trust_code: bool, step: int | None = None) -> Pretrained:
    """Open the export of a run's checkpoint, made if need be, or the directory of an export.

    Args:
        path: Directory of a run or an export.
        trust_code: Run code that lies in an export.
        step: Step of the run's checkpoint; None: the newest one.

    Raises:
        UserError: it is neither, cannot be exported, has no tokenizer, or code that is not trusted.
        DataError: as `export_run`.
    """
    directory = exported(path, step)
    require_tokenizer(directory)
    trusted = trust_code or directory != path
    require_trust(directory, trusted)
    facts = _facts(directory / FACTS)
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{directory} has no *.safetensors: give an export, or a run that has a checkpoint"
        )
    name = str(facts.get("run", path.resolve().name))
    return Pretrained(
        path=path,
        directory=directory,
        facts=facts,
        digest=model_digest(directory),
        trusted=trusted,
        name=name,
    )


def _facts(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_facts(path)
    except UserError as error:
        raise UserError(f"{str(error).rpartition('; ')[0]}; export the run again") from None


def group_models(models: Sequence[Pretrained], baseline: str | None = None) -> Groups[Pretrained]:
    """Group models by method, and by the settings in which models of one method differ.

    Args:
        baseline: Name of a group, its variant, or the name of a model; None: the first model's
            group.

    Raises:
        UserError: a model is given twice, two of a group have the same seed, or no such baseline.
    """
    refuse_twice((model.directory for model in models), "model", "directory")
    methods = [method_of(model) for model in models]
    return group_by_settings(models, methods, [model.settings() for model in models], baseline)


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of an export.

    Attributes:
        program: Tokenizer of transformers.
        start: Id of a document's end, after which every text of the training began; batches are
            padded with the same id, for no text has it.
        longest: Positions that the model was trained with.
    """

    program: Any
    start: int
    longest: int

    def ids(self, texts: list[str]) -> list[Ids]:
        ids: list[Ids] = self.program(texts, add_special_tokens=False)["input_ids"] if texts else []
        return ids


def load_tokenizer(pretrained: Pretrained) -> Tokenizer:
    """Load the model's tokenizer.

    Raises:
        UserError: transformers cannot load it, or it marks no end of a document.
    """
    directory, trusted = pretrained.directory, pretrained.trusted
    program = read_tokenizer(directory, trusted)
    with loading(directory):
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trusted, local_files_only=True
        )
    start = program.bos_token_id if program.bos_token_id is not None else program.eos_token_id
    if start is None:
        raise UserError(
            f"{directory}: the tokenizer has neither bos_token nor eos_token; name one of them"
        )
    if len(program) > config.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {len(program)} tokens, the model "
            f"{config.vocab_size}: these two do not belong together"
        )
    # On the right, so that positions count from the first token of every text.
    program.pad_token_id, program.padding_side = start, "right"
    return Tokenizer(program, int(start), int(config.max_position_embeddings))


def load_classifier(pretrained: Pretrained, task: Task, pad_id: int) -> nn.Module:
    """Load the model with a new head, drawn from torch's generator, in float32.

    Args:
        task: Task that the head is for.
        pad_id: Id of the padding.

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
        return _prepared(_classifier_around(load_language_model(pretrained), facts))
    directory = pretrained.directory
    with loading(directory):
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            str(directory),
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **facts,
        )
    model, info = loaded
    missing = [name for name in info["missing_keys"] if not name.startswith(HEAD)]
    refuse_missing(directory, missing)
    return _prepared(model)


def load_language_model(pretrained: Pretrained) -> Any:
    """Load the model as it was trained, in float32.

    Raises:
        UserError: transformers cannot load it, or a weight is missing.
    """
    return _prepared(read_language_model(pretrained.directory, pretrained.trusted, torch.float32))


def _classifier_around(language_model: Any, facts: dict[str, Any]) -> Any:
    """Return a stock classifier around the body of a subclass of a stock model."""
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
    """Let the embedding of the padding id train, and freeze the marks of normed heads.

    The padding id also begins every text, and is not attended to where it pads. An export's own
    code marks a head that has a norm by a number among its weights, which transformers makes
    trainable on loading.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    for name, weight in model.named_parameters():
        if name.endswith(("_norm.normed", ".norm.normed")):
            weight.requires_grad_(False)
    return model
