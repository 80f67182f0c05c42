"""Rank functions of test_designs.py: train tiny configs one after another in the same processes."""

from __future__ import annotations

import json
from typing import Any

from megatron_patches.recipe.counting import count_parameters
from pretrain.config.load import load_config
from pretrain.config.schedule import phases_of
from pretrain.ranks.signals import StopSignals
from pretrain.runs.metrics_file import read_metrics
from pretrain.training.loop import train


def train_all(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a report for each run: its curves, its audit, and the parameters that the formulas count.

    A run with `interrupted` true stops after its first step, saves, and is then trained to its end.
    """
    return [_train(run["overrides"], run["interrupted"]) for run in payload["runs"]]


def _train(overrides: list[str], interrupted: bool) -> dict[str, Any]:
    config = load_config("demo", overrides)
    if interrupted:
        signals = StopSignals()
        signals.stop = True
        train(config, signals)
        assert (config.run_path / "state").read_text() == "stopped\n"
    train(config, StopSignals())
    records = list(read_metrics(config.run_path / "metrics.jsonl"))
    counted = count_parameters(config.shape(), config.policy(), phases_of(config)[-1].number)
    return {
        "loss": [record["loss/train"] for record in records],
        "gradient_norm": [record["optim/grad_norm"] for record in records],
        "validation": [record["loss/valid"] for record in records if "loss/valid" in record],
        "audit": json.loads((config.run_path / "audit.json").read_text()),
        "counted": {"trainable": counted.trainable, "frozen": counted.frozen},
    }
