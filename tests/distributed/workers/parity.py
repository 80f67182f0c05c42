"""Rank functions of test_parity.py: train several tiny configs one after another in the same processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.config.load import load_config
from pretrain.ranks.signals import StopSignals
from pretrain.runs.metrics_file import read_metrics
from pretrain.training.loop import train


def train_all(payload: dict[str, Any]) -> list[dict[str, list[float]]]:
    """Each config's losses and gradient norms, read back from its metrics.jsonl."""
    curves = []
    for overrides in payload["runs"]:
        config = load_config("demo", overrides)
        train(config, StopSignals())
        records = list(read_metrics(Path(config.run_path) / "metrics.jsonl"))
        curves.append(
            {
                "loss": [record["loss/train"] for record in records],
                "gradient_norm": [record["optim/grad_norm"] for record in records],
                "validation": [
                    record["loss/valid"] for record in records if "loss/valid" in record
                ],
            }
        )
    return curves
