"""The curves of a run: what metrics.jsonl holds, as arrays, for every verb that reads runs back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import UserError
from pretrain.runs.metrics_file import read_metrics

Floats = NDArray[np.float64]

_TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/valid",
    "gradient_norm": "optim/grad_norm",
    "loss_variance": "stability/loss_variance",
    "step_seconds": "time/step",
    "tokens_per_second": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "hfu": "throughput/hfu",
    "device_bytes": "memory/allocated_peak",
    "host_bytes": "memory/host_rss",
}


@dataclass(frozen=True, eq=False)
class RunCurves:
    """One element per record of metrics.jsonl, [records]; NaN where there is no finite value.

    `steps` ascend; `tokens` are those consumed up to and with the step. Losses are in nats per token.
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    loss: Floats
    validation_loss: Floats
    gradient_norm: Floats
    loss_variance: Floats
    step_seconds: Floats
    tokens_per_second: Floats
    mfu: Floats
    hfu: Floats
    device_bytes: Floats
    host_bytes: Floats

    def after(self, step: float) -> NDArray[np.bool_]:
        """Which records are of steps later than `step`, [records]."""
        return self.steps > step


def read_curves(path: Path) -> RunCurves:
    """Read a metrics.jsonl.

    Raises:
        UserError: it is missing, empty, or damaged; names the file and, if it can, the line.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing: the run's directory is incomplete; restore the file")
    steps: list[int] = []
    tokens: list[int] = []
    values: dict[str, list[float]] = {name: [] for name in _TAGS}
    for record in read_metrics(path):
        steps.append(record["step"])
        tokens.append(_tokens(record, path))
        for name, tag in _TAGS.items():
            value = record.get(tag)
            values[name].append(np.nan if value is None else float(value))
    if not steps:
        raise UserError(f"{path} has no record: the run's directory is incomplete; restore the file")
    arrays = {name: np.array(content, dtype=np.float64) for name, content in values.items()}
    return RunCurves(steps=np.array(steps, np.int64), tokens=np.array(tokens, np.int64), **arrays)


def _tokens(record: Mapping[str, Any], path: Path) -> int:
    value = record.get("tokens")
    if not isinstance(value, int):
        raise UserError(f'{path}: step {record["step"]} has no integer "tokens"; restore the file')
    return value
