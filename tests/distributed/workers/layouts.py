"""Rank functions that resume runs from checkpoints of another layout."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.checkpoint.format import About
from pretrain.checkpoint.slices import counters_of
from pretrain.checkpoint.writing import HostBuffer, take_snapshot, write_snapshot
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.ranks.signals import StopSignals
from pretrain.runs.metrics_file import read_metrics
from pretrain.training.loop import run_steps
from pretrain.training.open_run import Run, open_run
from tests.fabricated_checkpoints import complete


class StopAfter(StopSignals):
    """As if somebody stopped the run after so many steps: the loop looks once a step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    @property
    def stop(self) -> bool:
        self._left -= 1
        return self._left <= 0

    @stop.setter
    def stop(self, value: bool) -> None:
        pass


def go_on(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Open each run, save at once what was loaded beside it, train some steps, save.

    Returns:
        For each its state, losses, and the micro steps of a step.
    """
    return [_go_on(run["overrides"], run["steps"], run["echo"]) for run in payload["runs"]]


def _go_on(overrides: list[str], steps: int, echo: str | None) -> dict[str, Any]:
    config = load_config("demo", overrides)
    with open_run(config) as run:
        if echo is not None:
            _save_beside(run, Path(echo))
        state = run_steps(run, StopAfter(steps))
        run.close(state)
    records = list(read_metrics(config.run_path / "metrics.jsonl"))
    return {
        "state": state,
        "loss": [record["loss/train"] for record in records],
        "micro steps": config.gradient_accumulation_steps(dist.get_world_size()),
    }


def _save_beside(run: Run, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write_snapshot(take_snapshot(run.engine, run.context, HostBuffer()), path, threading.Event())
    about = About(
        **run.checkpoints.identity,
        position=run.position,
        counters=counters_of(run.engine),
        layout=resolve(run.config, run.context.world_size).layout.as_dict(),
    )
    if run.context.is_first:
        complete(path, run.context.world_size, about)
    dist.barrier()
