"""The models to fine-tune: exports of runs, or directories of transformers, and what is known of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.export.cache import exported_apart
from pretrain.finetuning.frozen_rows import Rows
from pretrain.study.models import FACTS, model_digest, require_trust

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")
NEEDED_FACTS = (
    *("run", "seed", "step", "variant", "attention", "parameters"),
    *("sequence_length", "data", "model", "frozen_rows"),
)


@dataclass(frozen=True)
class Pretrained:
    """One model.

    Attributes:
        path: as the user gave it.
        directory: the export.
        facts: export.json; empty where it is somebody else's.
        digest: SHA-256 of weights, configuration and tokenizer.
        trusted: code that lies in the directory may be run.
    """

    path: Path
    directory: Path
    facts: Mapping[str, Any]
    digest: str
    trusted: bool

    @property
    def name(self) -> str:
        return str(self.facts.get("run", self.path.name))

    @property
    def seed(self) -> int | None:
        """Of the pretraining, where it is known."""
        return self.facts.get("seed")

    @property
    def place(self) -> str:
        """What tells models of one name apart in the names of files."""
        return hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:8]

    @property
    def frozen_rows(self) -> Rows:
        """What was frozen when the pretraining ended."""
        return self.facts.get("frozen_rows", {})

    @cached_property
    def method(self) -> str:
        """Variant and adapters; for somebody else's model its name."""
        if not self.facts:
            return self.path.name
        adapters = self.facts["attention"].get("adapters") or ()
        return "+".join([str(self.facts["variant"]), *adapters])

    def settings(self) -> dict[str, Any]:
        """What makes models of one method differ other than in their seeds."""
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


def open_pretrained(path: Path, trust_code: bool) -> Pretrained:
    """A run's export, made if need be, or the directory of an export.

    Raises:
        UserError: it is neither, cannot be exported, has no tokenizer, or code that is not trusted.
        DataError: as `export_run`.
    """
    directory = exported_apart(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{directory} has no tokenizer ({TOKENIZER_FILES[0]}): put the model's own there")
    trusted = trust_code or directory != path
    require_trust(directory, trusted)
    facts = _facts(directory / FACTS)
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory} has no *.safetensors: give an export, or a run that has a checkpoint")
    return Pretrained(path, directory, facts, model_digest(directory), trusted)


def group_models(models: Sequence[Pretrained]) -> list[str]:
    """For each model its group: the method, and the settings in which groups of that method differ.

    Raises:
        UserError: a model is given twice, or two of a group have the same seed.
    """
    if len({model.directory.resolve() for model in models}) < len(models):
        raise UserError("a model was given twice: give each directory once")
    names = []
    for model in models:
        others = [other.settings() for other in models if other.method == model.method]
        own = model.settings()
        differing = [key for key in own if any(other.get(key) != own[key] for other in others)]
        told = ", ".join(f"{key}={own[key]}" for key in differing)
        names.append(f"{model.method} ({told})" if told else model.method)
    for (name, seed), count in Counter((n, m.seed) for n, m in zip(names, models, strict=True)).items():
        if count > 1:
            raise UserError(f"two models of {name} have the same seed {seed}; leave one of them out")
    return names


def _facts(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if missing := [key for key in NEEDED_FACTS if key not in found]:
            raise ValueError(f"it has no '{missing[0]}'")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); export the run again") from error
    facts: Mapping[str, Any] = found
    return facts
