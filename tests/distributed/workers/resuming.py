"""Rank functions that resume whole runs from an earlier checkpoint, to compare the ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.ranks.signals import StopSignals
from pretrain.runs.directory import step_of
from pretrain.training.loop import train


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
