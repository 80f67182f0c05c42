"""Models to fine-tune: exports of runs, or directories of transformers, with the facts of export.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.export.run_exports import exported_apart
from pretrain.finetuning.frozen_rows import Rows
from pretrain.study.models import FACTS, model_digest, require_trust
from pretrain.study.seeds import Groups, group_by_settings, method_of, refuse_twice

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")
NEEDED_FACTS = (
    *("run", "seed", "step", "variant", "attention", "parameters"),
    *("sequence_length", "data", "model", "frozen_rows"),
)


@dataclass(frozen=True)
class Pretrained:
    """Model to fine-tune.

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
        """Return the seed of the pretraining, where it is known."""
        return self.facts.get("seed")

    @property
    def place(self) -> str:
        """Return letters that tell models of one name apart in the names of files."""
        return hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:8]

    @property
    def frozen_rows(self) -> Rows:
        """Return the rows that were frozen when the pretraining ended."""
        return self.facts.get("frozen_rows", {})

    @property
    def variant(self) -> str:
        """Return the variant; of a model without export.json its name."""
        return str(self.facts.get("variant", self.path.name))

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the section `attention` of the run's configuration; empty where it is not known."""
        return {"attention": self.facts.get("attention", {})}

    @property
    def method(self) -> str:
        """Return variant and adapters."""
        return method_of(self)

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


def open_pretrained(path: Path, trust_code: bool) -> Pretrained:
    """Open a run's export, made if need be, or the directory of an export.

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


def group_models(models: Sequence[Pretrained], baseline: str | None = None) -> Groups[Pretrained]:
    """Group models by method, and by the settings in which models of one method differ.

    Args:
        baseline: name of a group, its variant, or the name of a model; None: the first model's group.

    Raises:
        UserError: a model is given twice, two of a group have the same seed, or no such baseline.
    """
    refuse_twice((model.directory for model in models), "model", "directory")
    return group_by_settings(
        models, [model.method for model in models], [model.settings() for model in models], baseline
    )


def _facts(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        facts: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if missing := [key for key in NEEDED_FACTS if key not in facts]:
            raise ValueError(f"it has no '{missing[0]}'")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); export the run again") from error
    return facts
