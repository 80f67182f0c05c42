"""Curves of a run: metrics.jsonl as arrays, for every verb that reads runs back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.io.forms import LARGEST
from pretrain.errors import UserError
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import METRICS, Metric, metric_of

Floats = NDArray[np.float64]
_LARGEST = 1e300
WARM_UP = 0.1
"""First part of a run's steps that is start-up, for speeds and at least for gradient norms."""


@dataclass(frozen=True, eq=False)
class RunCurves:
    """The curves of a run: one element per record of metrics.jsonl, [records].

    `steps` ascend; `tokens` counts the tokens up to and including the step. `curves[metric]` or
    `curves[tag]` is a metric's curve, [records], in the metric's unit; NaN without a finite value.
    `last` is the last record as in the file.
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    columns: Mapping[Metric, Floats]
    last: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, metric: Metric | str) -> Floats:
        return self.columns[metric_of(metric) if isinstance(metric, str) else metric]

    def after(self, step: float) -> NDArray[np.bool_]:
        """Mask the records of steps later than `step`, [records]."""
        return self.steps > step


def read_curves(path: Path) -> RunCurves:
    """Read a metrics.jsonl.

    Raises:
        UserError: the file is missing, empty, or damaged.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing: the run's directory is incomplete; restore the file")
    steps, tokens = [], []
    record: dict[str, Any] = {}
    values: dict[Metric, list[float]] = {metric: [] for metric in METRICS if not metric.member}
    for record in read_metrics(path):
        tokens_so_far = record.get("tokens")
        if type(tokens_so_far) is not int or not 0 <= tokens_so_far < LARGEST:
            raise UserError(
                f'{path}: step {record["step"]} has no integer "tokens"; restore the file'
            )
        steps.append(record["step"])
        tokens.append(tokens_so_far)
        for metric, column in values.items():
            value = record.get(metric.tag)
            if not isinstance(value, (int, float, type(None))) or abs(value or 0) > _LARGEST:
                raise UserError(
                    f'{path}: step {record["step"]} has no number "{metric.tag}"; restore the file'
                )
            column.append(math.nan if value is None else float(value))
    if not steps:
        raise UserError(
            f"{path} has no record: the run's directory is incomplete; restore the file"
        )
    columns = {metric: np.array(column, dtype=np.float64) for metric, column in values.items()}
    return RunCurves(np.array(steps, np.int64), np.array(tokens, np.int64), columns, last=record)
