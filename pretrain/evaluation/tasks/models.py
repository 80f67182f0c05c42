"""Models under test: checkpoints of runs, and model directories in Hugging Face's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import UserError
from pretrain.export.select_checkpoint import find_checkpoint
from pretrain.runs.directory import RunDirectory, step_of
from pretrain.study.models import FACTS, WEIGHTS
from pretrain.study.seeds import refuse_twice


@dataclass(frozen=True)
class ModelUnderTest:
    """Model to evaluate, before it is loaded.

    Attributes:
        step: of the run's checkpoint; None for a directory that is no run.
        seed: `run.seed`; 0 where no run is known.
        config: of the run, by section; of an export its section `attention`, of another model that is empty.
    """

    path: Path
    name: str
    variant: str
    seed: int
    step: int | None
    config: Mapping[str, Any]

    @property
    def is_run(self) -> bool:
        return RunDirectory(self.path).config.is_file()


def read_models(paths: Sequence[Path], step: int | None) -> list[ModelUnderTest]:
    """Read the models in `paths`, without loading or exporting them.

    Models of one name are called by their paths. `step`: of the checkpoint of every run; None: the newest of
    each. Raises UserError: a path is given twice, or is neither a run with such a checkpoint nor a model.
    """
    refuse_twice(paths, place="directory")
    models = [_read_model(path, step) for path in paths]
    names = [model.name for model in models]
    return [one if names.count(one.name) == 1 else replace(one, name=str(one.path)) for one in models]


def _read_model(path: Path, step: int | None) -> ModelUnderTest:
    run = RunDirectory(path)
    if run.config.is_file():
        content = _mapping(run.config)
        checkpoint = step_of(find_checkpoint(run, step))
        try:
            name, seed = str(content["run"]["name"]), int(content["run"]["seed"])
            variant = str(content["attention"]["variant"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{run.config} is no run's configuration ({error}); restore the file") from error
        return ModelUnderTest(path, name, variant, seed, checkpoint, content)
    if not (path / "config.json").is_file() or not any(list(path.glob(kind)) for kind in WEIGHTS):
        raise UserError(
            f"{path} is neither a run (it has no config.yaml) nor a model of transformers (config.json and "
            "weights); give one of these"
        )
    if step is not None:
        raise UserError(f"--step {step}: {path} is an export, which is of one step; leave --step out")
    name = path.resolve().name
    if not (path / FACTS).is_file():
        return ModelUnderTest(path, name, name, 0, None, {"attention": {}})
    facts = _mapping(path / FACTS)
    return ModelUnderTest(
        path,
        name,
        str(facts.get("variant", name)),
        int(facts.get("seed", 0)),
        facts.get("step"),
        {"attention": facts.get("attention") or {}},
    )


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); restore the file") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a mapping of keys to values; restore the file")
    return content


def model_directory(model: ModelUnderTest) -> Path:
    """Return the directory for transformers: of a run, the export that is kept in it, made now if need be.

    Raises UserError, DataError as `export_run`.
    """
    if not model.is_run:
        return model.path
    from pretrain.export.run_exports import exported_apart

    return exported_apart(model.path, model.step)
