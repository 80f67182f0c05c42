"""Models to fine-tune: exports of runs, or directories of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline.sources.hub import one_line
from laboratory.finetuning.glue_data import HUB_NAME, Task
from laboratory.finetuning.query_key import Rows
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
    """Open the export of a run's checkpoint, made if need be, or a model of transformers.

    Args:
        path: Directory of a run or of a model, or a model's name on the hub.
        trust_code: Run code that lies in an export.
        step: Step of the run's checkpoint; None: the newest one.

    Raises:
        UserError: it is neither, cannot be exported, has no tokenizer, or code that is not trusted.
        DataError: as `export_run`.
    """
    on_hub = not path.exists() and HUB_NAME.fullmatch(str(path))
    directory = _downloaded(path) if on_hub else exported(path, step)
    require_tokenizer(directory)
    trusted = trust_code or directory != path
    require_trust(directory, trusted)
    facts = _facts(directory / FACTS)
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{directory} has no *.safetensors: give an export, or a run that has a checkpoint"
        )
    digest = model_digest(directory)
    name = str(facts.get("run", path.resolve().name))
    return Pretrained(path, directory, facts, digest, trusted=trusted, name=name)


def _downloaded(path: Path) -> Path:
    """Download a model of the hub, without code and pickled weights."""
    from huggingface_hub import snapshot_download

    try:
        kinds = ["*.json", "*.txt", "*.model", "*.safetensors"]
        return Path(snapshot_download(str(path), allow_patterns=kinds))
    except Exception as error:  # of the network, the hub and the disk
        reason = one_line(error)[:300].rstrip(".")
        problem = f"{path} is not a directory, and the hub does not give it: {reason}"
        raise UserError(problem) from error


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


def load_tokenizer(pretrained: Pretrained) -> Any:
    """Load the tokenizer, whose `model_max_length` is what the model has positions for.

    A decoder reads from left to right; its tokenizer marks no class token. Its `pad_token` is here
    the token that every text begins with.

    Raises:
        UserError: transformers cannot load it, or it marks no end of a document.
    """
    from transformers import AutoConfig

    directory, trusted = pretrained.directory, pretrained.trusted
    tokenizer = read_tokenizer(directory, trusted)
    with loading(directory):
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trusted, local_files_only=True
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {len(tokenizer)} tokens, the model "
            f"{config.vocab_size}: these two do not belong together"
        )
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    if tokenizer.cls_token_id is None:
        start = tokenizer.bos_token or tokenizer.eos_token
        if start is None:
            raise UserError(
                f"{directory}: the tokenizer has neither bos_token nor eos_token; name one of them"
            )
        tokenizer.pad_token = start
        # So that positions count from the first token of every text.
        tokenizer.padding_side = "right"
    return tokenizer


def load_classifier(pretrained: Pretrained, task: Task, tokenizer: Any) -> Any:
    """Load the model with a new head, drawn from torch's generator, in float32.

    Raises:
        UserError: transformers cannot load it, or has no classifier of that kind.
    """
    from transformers import AutoModelForSequenceClassification

    facts: dict[str, Any] = {
        "num_labels": task.labels or 1,
        "problem_type": "single_label_classification" if task.labels else "regression",
        "pad_token_id": tokenizer.pad_token_id,
    }
    directory = pretrained.directory
    if list(directory.glob("*.py")):
        body = read_language_model(directory, pretrained.trusted, torch.float32)
        return _classifier_around(body, facts)
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
    model.config.use_cache = False
    # A pooler is part of the head: models of language have none.
    body_prefix = f"{model.base_model_prefix}."
    missing = [key for key in info["missing_keys"] if key.startswith(body_prefix)]
    refuse_missing(directory, [key for key in missing if "pooler" not in key])
    return model


def _classifier_around(language_model: Any, facts: dict[str, Any]) -> Any:
    """Return a stock classifier around the body of a subclass of a stock model."""
    from transformers import AutoModelForSequenceClassification

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
