"""A finished run, read back from its directory without torch: for `compare` and for users' own tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pretrain.errors import UserError
from pretrain.runs.curves import RunCurves, read_curves
from pretrain.runs.directory import DIVERGED, FINISHED, RunDirectory
from pretrain.runs.tags import LOSS, PERPLEXITY, PERPLEXITY_OF_SOURCE, VALIDATION_LOSS

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SHALLOW = 1 << 14  # characters: libyaml has no limit of depth, and overflows its stack in a longer text
"""libyaml's parser, where PyYAML was built with it, is several times as fast."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run. Losses are in nats per token; perplexity and loss are None where not finite.

    `unigram_perplexity` is that of the validation text for a model without context.
    """

    steps: int
    tokens: int
    validation_loss: float | None
    validation_perplexity: float | None
    unigram_perplexity: float
    perplexity_by_source: Mapping[str, float | None]


@dataclass(frozen=True)
class ModelSize:
    """Parameters of the whole model."""

    trainable_parameters: int
    frozen_parameters: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes, sums over ranks: what trains, the frozen bank, gradients, optimizer state with master weights.

    `checkpoint_bytes` counts all files of one checkpoint.
    """

    weight_bytes: int
    frozen_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    checkpoint_bytes: int

    @property
    def in_memory(self) -> int:
        """Sum all states but the checkpoint."""
        return self.weight_bytes + self.frozen_bytes + self.gradients_and_optimizer_state

    @property
    def gradients_and_optimizer_state(self) -> int:
        return self.gradient_bytes + self.optimizer_state_bytes


@dataclass(frozen=True)
class FinishedRun:
    """A finished run as its directory has it; `size` and `states` were counted in the live engine."""

    path: Path
    name: str
    variant: str
    seed: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    data_fingerprint: str
    validation_tokens: Mapping[str, int]
    zero_stage: int
    result: RunResult
    size: ModelSize
    states: StateBytes
    curves: RunCurves = field(repr=False)
    validation_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of held-out text by source; {} for a run of a version that did not record them."""

    @property
    def device(self) -> str | None:
        """Return the device; for a CPU also which of torch's kernels: each kind rounds otherwise."""
        device, kernels = (self.environment.get(key) for key in ("device", "cpu_kernels"))
        return f"{device} with {kernels}" if device == "cpu" and kernels else device


def read_finished_run(path: Path) -> FinishedRun:
    """Read the run in `path`; UserError names what is missing or that the run has not finished."""
    run = RunDirectory(path)
    run.require_run()
    config = _Document(run.config)
    name = str(config.get("run", "name"))
    _require_finished(run, name)
    environment, data, audit = _Document(run.environment), _Document(run.data), _Document(run.audit)
    curves = read_curves(run.metrics)
    _require_whole(run, curves, config, environment)
    summary = _Document(run.summary)
    return FinishedRun(
        path=path,
        name=name,
        variant=str(config.get("attention", "variant")),
        seed=config.get("run", "seed"),
        config=config.content,
        environment=environment.content,
        data_fingerprint=data.get("fingerprint"),
        validation_tokens=data.get("validation_tokens"),
        zero_stage=audit.get("zero_stage"),
        result=RunResult(
            steps=summary.get("step"),
            tokens=summary.get("tokens"),
            validation_loss=summary.get("validation", "loss"),
            validation_perplexity=summary.get("validation", "perplexity"),
            unigram_perplexity=data.get("unigram_perplexity"),
            perplexity_by_source=summary.get("validation", "perplexity_by_source"),
        ),
        size=ModelSize(
            trainable_parameters=audit.get("totals", "model_trainable_parameters"),
            frozen_parameters=audit.get("totals", "model_frozen_parameters"),
        ),
        states=StateBytes(
            weight_bytes=audit.get("totals", "trainable_bytes"),
            frozen_bytes=audit.get("totals", "frozen_bytes"),
            gradient_bytes=audit.get("totals", "gradient_bytes"),
            optimizer_state_bytes=audit.get("totals", "optimizer_state_bytes"),
            checkpoint_bytes=newest_checkpoint_bytes(path),
        ),
        curves=curves,
        validation_bytes=data.content.get("validation_bytes", {}),
    )


def leave_out_others(paths: Sequence[Path], models: bool = False) -> tuple[list[Path], str]:
    """Return the paths without those that are there but hold no run, and a line that names these, or "".

    Where none holds a run, all are returned, for the reader to refuse the first. `models`: keep directories
    of transformers too.
    """
    runs = [RunDirectory(path) for path in paths if path.exists()]
    parts = ((run.path, (run.config, run.state_file, run.metrics, run.checkpoints)) for run in runs)
    others = [path for path, files in parts if not any(file.exists() for file in files)]
    others = [path for path in others if not (models and (path / "config.json").is_file())]
    if not others or len(others) == len(paths):
        return list(paths), ""
    named = ", ".join(map(str, others))
    return [path for path in paths if path not in others], f"left out, for there is no run in it: {named}"


def newest_checkpoint_bytes(run_path: Path) -> int:
    """Sum the bytes of all files of the run's newest complete checkpoint."""
    newest = RunDirectory(run_path).newest_checkpoint()
    if newest is None:
        raise UserError(f"{run_path} has no complete checkpoint; resume the run to write one")
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def _require_finished(run: RunDirectory, name: str) -> None:
    state = run.state() or "unknown"
    if state == DIVERGED:
        raise UserError(
            f"run '{name}' ({run.path}) has diverged, its last numbers are not finite: resume it with a "
            "lower optimizer.learning_rate, or leave it out"
        )
    if state != FINISHED:
        raise UserError(
            f"run '{name}' ({run.path}) has not finished (its state is '{state}'): "
            "resume it with the same train command, or leave it out"
        )


def _require_whole(run: RunDirectory, curves: RunCurves, config: _Document, environment: _Document) -> None:
    """Refuse a run in which no training loss is finite, or whose records are not all there.

    A start of the run may find fewer records than it goes on from, and has said so then: not an error here.
    """
    if not np.isfinite(curves[LOSS]).any():
        raise UserError(
            f"{run.metrics}: no {LOSS.tag} of this run is finite; leave the run out, or train it anew with a "
            "lower optimizer.learning_rate"
        )
    recorded = set(curves.steps.tolist())
    starts = _starts(config, environment)
    ends = [*(first for first, _ in starts[1:]), int(curves.steps[-1]) + 1]
    for number, (first, every) in enumerate(starts):
        span = range(first, min(ends[number:]))
        newest = max(recorded.intersection(span), default=0)
        lost = [step for step in span if step % every == 0 and step < newest and step not in recorded]
        if lost:
            others = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
            raise UserError(
                f"{run.metrics} has no record of step {lost[0]}{others}, though telemetry.every was {every}; "
                "restore the file, or leave the run out"
            )


def _starts(config: _Document, environment: _Document) -> list[tuple[int, int]]:
    """Return (first step, steps between records) of each start of the run."""
    every = config.get("telemetry", "every")
    starts = []
    for segment in reversed(environment.content.get("segments") or [{"first_step": 1, "changes": {}}]):
        starts.append((int(segment["first_step"]), int(every)))
        every = segment["changes"].get("telemetry.every", {}).get("was", every)
    return starts[::-1]


class _Document:
    """A JSON or YAML file whose missing parts are reported by file and key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise UserError(f"{path} is missing: the run's directory is incomplete; restore the file")
        try:
            text = path.read_text(encoding="utf-8")
            loader = _YAML if len(text) < _SHALLOW else yaml.SafeLoader
            content = yaml.load(text, loader) if path.suffix == ".yaml" else json.loads(text)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
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


def summary_of(last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json, the result of a run for scripts, from its last record."""
    return {
        "step": last["step"],
        "tokens": last["tokens"],
        "samples": last["samples"],
        "loss": last[LOSS.tag],
        "validation": {
            "loss": last[VALIDATION_LOSS.tag],
            "perplexity": last[PERPLEXITY.tag],
            "perplexity_by_source": PERPLEXITY_OF_SOURCE.members(last),
        },
    }
