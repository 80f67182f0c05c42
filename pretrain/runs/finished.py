"""Reads a finished run back from its directory, without torch: for `compare` and for users' own tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import UserError
from pretrain.runs.curves import RunCurves, read_curves


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run left on disk.

    Perplexity and loss are None where they were not finite. `weight_bytes` (what trains), `frozen_bytes` (the
    bank), `gradient_bytes` and `optimizer_state_bytes` (master weights included) are sums over ranks, counted
    in the live engine; `checkpoint_bytes` counts all files of the newest checkpoint.
    """

    path: Path
    name: str
    variant: str
    seed: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    data_fingerprint: str
    unigram_perplexity: float
    validation_tokens: Mapping[str, int]
    steps: int
    tokens: int
    validation_loss: float | None
    validation_perplexity: float | None
    perplexity_by_source: Mapping[str, float | None]
    zero_stage: int
    trainable_parameters: int
    frozen_parameters: int
    weight_bytes: int
    frozen_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    checkpoint_bytes: int
    curves: RunCurves = field(repr=False)


def read_finished_run(path: Path) -> FinishedRun:
    """Read the run in `path`; UserError names what is missing or that the run has not finished."""
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml; give the directory of a run")
    config = _Document(path / "config.yaml")
    name = str(config.get("run", "name"))
    _require_finished(path, name)
    environment = _Document(path / "environment.json")
    data = _Document(path / "data.json")
    audit = _Document(path / "audit.json")
    summary = _Document(path / "summary.json")
    return FinishedRun(
        path=path,
        name=name,
        variant=str(config.get("attention", "variant")),
        seed=config.get("run", "seed"),
        config=config.content,
        environment=environment.content,
        data_fingerprint=data.get("fingerprint"),
        unigram_perplexity=data.get("unigram_perplexity"),
        validation_tokens=data.get("validation_tokens"),
        steps=summary.get("step"),
        tokens=summary.get("tokens"),
        validation_loss=summary.get("validation", "loss"),
        validation_perplexity=summary.get("validation", "perplexity"),
        perplexity_by_source=summary.get("validation", "perplexity_by_source"),
        zero_stage=audit.get("zero_stage"),
        trainable_parameters=audit.get("totals", "model_trainable_parameters"),
        frozen_parameters=audit.get("totals", "model_frozen_parameters"),
        weight_bytes=audit.get("totals", "trainable_bytes"),
        frozen_bytes=audit.get("totals", "frozen_bytes"),
        gradient_bytes=audit.get("totals", "gradient_bytes"),
        optimizer_state_bytes=audit.get("totals", "optimizer_state_bytes"),
        checkpoint_bytes=newest_checkpoint_bytes(path),
        curves=read_curves(path / "metrics.jsonl"),
    )


def holds_no_run(path: Path) -> bool:
    """Whether `path` is there but is no run, whole or damaged: what else `runs/*` may find."""
    parts = ("config.yaml", "state", "metrics.jsonl", "checkpoints")
    return path.exists() and not any((path / part).exists() for part in parts)


def newest_checkpoint_bytes(run_path: Path) -> int:
    """Bytes of all files of the checkpoint that RUN/checkpoints/latest names."""
    latest = run_path / "checkpoints" / "latest"
    if not latest.is_file():
        raise UserError(
            f"{latest} is missing: the run has no complete checkpoint; resume the run to write one"
        )
    directory = latest.parent / latest.read_text().strip()
    if not (directory / "COMPLETE").is_file():
        raise UserError(
            f"{directory}, named by {latest}, has no COMPLETE marker; resume the run to write one"
        )
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _require_finished(path: Path, name: str) -> None:
    state_path = path / "state"
    state = state_path.read_text().strip() if state_path.is_file() else "unknown"
    if state != "finished":
        raise UserError(
            f"run '{name}' ({path}) has not finished (its state is '{state}'): "
            "resume it with the same train command, or leave it out"
        )


class _Document:
    """A JSON or YAML file whose missing parts are reported by file and key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise UserError(f"{path} is missing: the run's directory is incomplete; restore the file")
        try:
            text = path.read_text(encoding="utf-8")
            content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        except (ValueError, yaml.YAMLError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path} cannot be read ({reason}); restore the file") from error
        if not isinstance(content, dict):
            raise UserError(f"{path} does not hold a mapping of keys to values; restore the file")
        self.content: Mapping[str, Any] = content

    def get(self, *keys: str) -> Any:
        value: Any = self.content
        for key in keys:
            if not isinstance(value, Mapping) or key not in value:
                raise UserError(
                    f"{self._path} has no key '{'.'.join(keys)}': it is no file of this version; run again"
                )
            value = value[key]
        return value
