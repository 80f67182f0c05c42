"""Rank functions of test_data.py.

Put global batches together, and resume on data that has changed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.ranks.signals import StopSignals
from pretrain.runs.environment import data_changes
from pretrain.runs.metrics_file import read_metrics
from pretrain.training.loop import train
from pretrain.training.open_run import open_run
from tests.distributed.workers.runs import of_all_ranks


def global_batches(payload: dict[str, Any]) -> list[list[list[int]]]:
    """For each config: the samples of three global batches, in the order of the ranks."""
    return [_global_batches(load_config("demo", overrides)) for overrides in payload["runs"]]


def _global_batches(config: Config) -> list[list[int]]:
    samples: list[list[int]] = []
    with open_run(config) as run:
        for consumed in range(0, 3 * config.data.global_batch_size, config.data.global_batch_size):
            for micro_batch in run.batches.at(consumed):
                ranks = of_all_ranks(micro_batch.tolist())
                samples += [sample for rank in ranks for sample in rank]
    return samples


def resumes(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Train the first config.

    Then the others, each on a copy of its run: the error, or the records.
    """
    first, *others = payload["runs"]
    trained = load_config("demo", first)
    train(trained, StopSignals())
    return [_resume(trained.run_path, load_config("demo", overrides)) for overrides in others]


def _resume(trained: Path, config: Config) -> dict[str, Any]:
    shutil.copytree(trained, config.run_path)
    try:
        train(config, StopSignals())
    except ValueError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    environment = json.loads((config.run_path / "environment.json").read_text())
    return {
        "records": list(read_metrics(config.run_path / "metrics.jsonl")),
        "changes": data_changes(environment),
    }
