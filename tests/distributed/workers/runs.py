"""Rank functions that train whole runs, or resume them from an earlier checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_pipeline.errors import DataError
from megatron_patches.errors import MethodError
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.ranks.groups import (
    LaunchEnvironment,
    ParallelContext,
    initialize_distributed,
    shutdown_distributed,
)
from pretrain.ranks.signals import StopSignals
from pretrain.runs.directory import step_of
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.position import Position
from pretrain.telemetry.records import StepResult
from pretrain.training.loop import train, train_step
from pretrain.training.open_run import Run


@contextmanager
def parallel(tensor_parallel_size: int | None = None) -> Iterator[ParallelContext]:
    """Process groups of all ranks, each of them tensor-parallel unless a size is given."""
    launch = LaunchEnvironment.read()
    size = tensor_parallel_size or launch.world_size
    context = initialize_distributed(launch, size, timeout_seconds=300)
    yield context
    shutdown_distributed(context)


def of_all_ranks(value: Any) -> list[Any]:
    """Return every rank's value, by rank (collective)."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train_all(payload: dict[str, Any]) -> list[str]:
    """Final state of every run, one after the other, or the sentence that refuses it."""
    return [state_of(overrides) for overrides in payload["runs"]]


def state_of(overrides: list[str], config: str = "demo") -> str:
    """Train a run; return its final state, or the sentence that refuses it."""
    try:
        return train(load_config(config, overrides), StopSignals())
    except (UserError, DataError, MethodError) as error:
        return f"error: {error}"


def next_step(run: Run, position: Position) -> tuple[StepResult, Position]:
    """Train the step behind a position; return its result, and the position behind it."""
    result, _ = train_step(run, position, StopSignals())
    config = run.config
    return result, position.after_step(
        config.data.global_batch_size,
        config.tokens_per_step,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        updated=result.updated,
    )


def curves(overrides: list[str], tags: Sequence[str]) -> dict[str, list[float]]:
    """Train a run; return {tag: values} of the records that have it."""
    config = load_config("demo", overrides)
    train(config, StopSignals())
    records = list(read_metrics(config.run_path / "metrics.jsonl"))
    return {tag: [record[tag] for record in records if tag in record] for tag in tags}


def train_again(overrides: list[str], after: int, *changes: str) -> Config:
    """Copy a finished run as if it had ended after a step, and train the copy to its end.

    Args:
        overrides: of the run.
        after: the step, of which it has a checkpoint.
        changes: further overrides of the copy, which is NAME-after-STEP.
    """
    source = load_config("demo", overrides).run_path
    config = load_config("demo", [*overrides, f"run.name={source.name}-after-{after}", *changes])
    copy_up_to(source, config.run_path, after)
    assert train(config, StopSignals()) == "finished"
    return config


def copy_up_to(source: Path, target: Path, step: int) -> None:
    """Copy a run as if it had ended after a step; rank 0 copies, and all wait."""
    if dist.get_rank() == 0:
        shutil.copytree(source, target)
        for checkpoint in (target / "checkpoints").glob("step_*"):
            if step_of(checkpoint) > step:
                shutil.rmtree(checkpoint)
        (target / "checkpoints/latest").write_text(f"step_{step:08d}\n")
    dist.barrier()
