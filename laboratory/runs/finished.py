"""A finished run, read back from its directory without torch: for `compare` and users' tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.io.words import shown_in_line
from laboratory.runs.agreement import read_result, require_agreement
from pretrain.errors import UserError
from pretrain.runs.curves import RunCurves, read_curves
from pretrain.runs.directory import DIVERGED, FINISHED, RunDirectory, newest_checkpoint_bytes
from pretrain.runs.environment import earlier_settings
from pretrain.runs.facts import read_facts
from pretrain.runs.metrics_file import last_record
from pretrain.runs.tags import LOSS


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Losses are in nats per token; perplexity and loss are None where not finite.
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
    """Bytes of what trains, the frozen bank, gradients and optimizer state: sums over ranks.

    `checkpoint_bytes` counts all files of one checkpoint; None where none was kept.
    """

    weight_bytes: int
    frozen_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    checkpoint_bytes: int | None

    @property
    def in_memory(self) -> int:
        """Sum all states but the checkpoint."""
        return self.weight_bytes + self.frozen_bytes + self.gradients_and_optimizer_state

    @property
    def gradients_and_optimizer_state(self) -> int:
        return self.gradient_bytes + self.optimizer_state_bytes


@dataclass(frozen=True)
class FinishedRun:
    """A finished run; `size` and `states` were counted in the live engine."""

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
        """Return the device, for a CPU with its kernels, whose rounding differs."""
        device, kernels = (self.environment.get(key) for key in ("device", "cpu_kernels"))
        return f"{device} with {kernels}" if device == "cpu" and kernels else device

    @property
    def earlier_settings(self) -> list[tuple[str, Any, int]]:
        """Return (section.key, value, last step) of settings that a resume has changed."""
        return earlier_settings(self.environment)


def read_finished_run(path: Path) -> FinishedRun:
    """Read the run in `path`; UserError names what is missing or that the run has not finished."""
    run = RunDirectory(path)
    run.require_run()
    config = read_facts(run.config)
    name = config["run"]["name"]
    _require_finished(run, name)
    environment, data, audit = (read_facts(path) for path in (run.environment, run.data, run.audit))
    curves = read_curves(run.metrics)
    _require_settings(run, environment)
    _require_whole(run, curves, config, environment)
    summary = read_result(run, curves.last)
    files = {"config": config, "environment": environment, "audit": audit, "summary": summary}
    require_agreement(run, files, curves)
    totals, validation = audit["totals"], summary["validation"]
    return FinishedRun(
        path=path,
        name=shown_in_line(name),
        variant=shown_in_line(config["attention"]["variant"]),
        seed=config["run"]["seed"],
        config=config,
        environment=environment,
        data_fingerprint=data["fingerprint"],
        validation_tokens=data["validation_tokens"],
        zero_stage=audit["zero_stage"],
        result=RunResult(
            steps=summary["step"],
            tokens=summary["tokens"],
            validation_loss=validation["loss"],
            validation_perplexity=validation["perplexity"],
            unigram_perplexity=data["unigram_perplexity"],
            perplexity_by_source=validation["perplexity_by_source"],
        ),
        size=ModelSize(totals["model_trainable_parameters"], totals["model_frozen_parameters"]),
        states=StateBytes(
            weight_bytes=totals["trainable_bytes"],
            frozen_bytes=totals["frozen_bytes"],
            gradient_bytes=totals["gradient_bytes"],
            optimizer_state_bytes=totals["optimizer_state_bytes"],
            checkpoint_bytes=newest_checkpoint_bytes(path),
        ),
        curves=curves,
        validation_bytes=data.get("validation_bytes", {}),
    )


def read_summary(run: RunDirectory) -> dict[str, Any]:
    """Return the content of a finished run's summary.json, without reading all of the run.

    Raises:
        UserError: it is missing or damaged, or not the result of the last record.
    """
    if not run.metrics.is_file():
        raise UserError(f"{run.metrics} is missing: the run's directory is incomplete; restore it")
    return read_result(run, last_record(run.metrics))


def leave_out_others(paths: Sequence[Path], models: bool = False) -> tuple[list[Path], str]:
    """Leave out the paths that exist and hold no run.

    Where none holds a run, all are returned, for the reader to refuse the first.

    Args:
        paths: Paths of runs, as the user gave them.
        models: Keep directories of transformers too.

    Returns:
        The paths that stay, and a line that names the others, or "".
    """
    runs = [RunDirectory(path) for path in paths if path.exists()]
    parts = ((run.path, (run.config, run.state_file, run.metrics, run.checkpoints)) for run in runs)
    skipped = [path for path, files in parts if not any(file.exists() for file in files)]
    skipped = [path for path in skipped if not (models and (path / "config.json").is_file())]
    if not skipped or len(skipped) == len(paths):
        return list(paths), ""
    kept = [path for path in paths if path not in skipped]
    return kept, f"left out, because there is no run in it: {', '.join(map(str, skipped))}"


def _require_finished(run: RunDirectory, name: str) -> None:
    state = run.state() or "unknown"
    if state == DIVERGED:
        raise UserError(
            f"run '{name}' ({run.path}) has diverged, its last numbers are not finite: resume it "
            "with a lower optimizer.learning_rate, or leave it out"
        )
    if state != FINISHED:
        raise UserError(
            f"run '{name}' ({run.path}) has not finished (its state is '{state}'): "
            "resume it with the same train command, or leave it out"
        )


def _require_settings(run: RunDirectory, environment: Mapping[str, Any]) -> None:
    """Refuse a run that lost its settings at some start, so that they are not known."""
    for segment in environment.get("segments", []):
        lost = [
            file.name
            for file in (run.config, run.environment)
            if file.name in segment.get("lost", [])
        ]
        if lost:
            raise UserError(
                f"{run.path} had lost its {' and '.join(lost)} when it started at step "
                f"{segment['first_step']}, so what it trained with before is not known; leave it "
                "out"
            )


def _require_whole(
    run: RunDirectory, curves: RunCurves, config: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Refuse a run without a finite training loss, or with missing records.

    A start of the run may find fewer records than it continues from, and has said so then: not an
    error here.
    """
    if not np.isfinite(curves[LOSS]).any():
        raise UserError(
            f"{run.metrics}: no {LOSS.tag} of this run is finite; leave the run out, or train it "
            "anew with a lower optimizer.learning_rate"
        )
    starts = _starts(config, environment)
    # A start that fell back replaces the records behind its first step.
    ends = [curves.steps[-1] + 1, *(first for first, _ in starts[:0:-1])]
    for (first, every), end in zip(starts, np.minimum.accumulate(ends)[::-1], strict=True):
        records = curves.steps[: np.searchsorted(curves.steps, end)]
        expected = range(-(-first // every) * every, int(records[-1]) if len(records) else 0, every)
        present = {step for step in records.tolist() if step in expected}
        missing = len(expected) - len(present)
        if missing:
            lost = next(step for step in expected if step not in present)
            more = f" and {missing - 1} others" if missing > 1 else ""
            raise UserError(
                f"{run.metrics} has no record of step {lost}{more}, though telemetry.every was "
                f"{every}; restore the file, or leave the run out"
            )


def _starts(config: Mapping[str, Any], environment: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (first step, steps between records) of each start of the run."""
    every = config["telemetry"]["every"]
    starts = []
    for segment in reversed(environment.get("segments") or [{"first_step": 1, "changes": {}}]):
        starts.append((segment["first_step"], every))
        every = segment["changes"].get("telemetry.every", {}).get("was", every)
    return starts[::-1]
