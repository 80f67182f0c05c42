"""Rank functions that resume whole runs from a checkpoint before the last, to compare the ends."""

from __future__ import annotations

import json
import shutil
from typing import Any

import torch.distributed as dist

from megatron_patches.recipe.counting import count_parameters
from pretrain.config.load import load_config
from pretrain.ranks.signals import StopSignals
from pretrain.training.loop import train


def resumed_runs(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Train each configuration, take its last checkpoint away, and train again from the one before.

    Each answer has what the configuration says of its parameters; the caller compares the
    checkpoints.
    """
    answers = []
    for overrides in payload["runs"]:
        config = load_config("demo", overrides)
        assert train(config, StopSignals()) == "finished"
        last = config.run_path / f"checkpoints/step_{config.total_steps:08d}"
        if dist.get_rank() == 0:
            shutil.move(config.run_path / "metrics.jsonl", config.run_path / "uninterrupted.jsonl")
            shutil.copy(config.run_path / "uninterrupted.jsonl", config.run_path / "metrics.jsonl")
            shutil.move(last, config.run_path / "uninterrupted")
            last.with_name("latest").unlink()  # else the start says that a checkpoint is lost
        dist.barrier()
        assert train(config, StopSignals()) == "finished"
        counted = count_parameters(config.shape, config.policy)
        answers.append(
            {
                "counted": {"trainable": counted.trainable, "frozen": counted.frozen},
                "checkpoint": str(last),
                "uninterrupted": str(config.run_path / "uninterrupted"),
                "audit": json.loads((config.run_path / "audit.json").read_text()),
                "identity": json.loads((last / "checkpoint.json").read_text()),
            }
        )
    return answers
