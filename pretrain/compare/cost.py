"""What the runs of a variant took: speed, parameters, memory by kind, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.compare.convergence import WARM_UP
from pretrain.runs.curves import Floats, RunCurves
from pretrain.runs.finished import FinishedRun


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of n values."""

    n: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """Speeds are over the steps of all runs after each run's first tenth.

    Counts and bytes are medians over the runs, which are equal unless the layout changed. Bytes are sums over
    ranks, except the two peaks: those are of rank 0's process (`device` on CUDA only; `host` is resident).
    """

    step_seconds: Quartiles | None
    tokens_per_second: Quartiles | None
    mfu: Quartiles | None
    hfu: Quartiles | None
    trainable_parameters: int
    frozen_parameters: int
    weight_bytes: int
    frozen_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    checkpoint_bytes: int
    peak_device_bytes: int | None
    peak_host_bytes: int | None


def measured_cost(runs: Sequence[FinishedRun]) -> Cost:
    """Summarise the runs of one variant."""

    def count(of: Callable[[FinishedRun], int]) -> int:
        return round(float(np.median([of(run) for run in runs])))

    return Cost(
        step_seconds=_steady(runs, lambda curves: curves.step_seconds),
        tokens_per_second=_steady(runs, lambda curves: curves.tokens_per_second),
        mfu=_steady(runs, lambda curves: curves.mfu),
        hfu=_steady(runs, lambda curves: curves.hfu),
        trainable_parameters=count(lambda run: run.trainable_parameters),
        frozen_parameters=count(lambda run: run.frozen_parameters),
        weight_bytes=count(lambda run: run.weight_bytes),
        frozen_bytes=count(lambda run: run.frozen_bytes),
        gradient_bytes=count(lambda run: run.gradient_bytes),
        optimizer_state_bytes=count(lambda run: run.optimizer_state_bytes),
        checkpoint_bytes=count(lambda run: run.checkpoint_bytes),
        peak_device_bytes=_peak(runs, lambda curves: curves.device_bytes),
        peak_host_bytes=_peak(runs, lambda curves: curves.host_bytes),
    )


def quartiles(values: Floats) -> Quartiles | None:
    """Of the values that are finite; None if there is none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, median, high = np.percentile(finite, [25, 50, 75])
    return Quartiles(n=len(finite), median=float(median), low=float(low), high=float(high))


def _steady(runs: Sequence[FinishedRun], of: Callable[[RunCurves], Floats]) -> Quartiles | None:
    return quartiles(np.concatenate([of(run.curves)[run.curves.after(WARM_UP * run.steps)] for run in runs]))


def _peak(runs: Sequence[FinishedRun], of: Callable[[RunCurves], Floats]) -> int | None:
    peaks = [np.nanmax(of(run.curves)) for run in runs if np.isfinite(of(run.curves)).any()]
    return round(float(np.median(peaks))) if peaks else None
