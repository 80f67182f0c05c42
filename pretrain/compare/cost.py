"""Cost of a variant's runs: speed, parameters, memory by kind, checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from pretrain.runs.curves import WARM_UP, Floats
from pretrain.runs.finished import FinishedRun, ModelSize, StateBytes
from pretrain.runs.tags import DEVICE_BYTES, HFU, HOST_BYTES, MFU, STEP_SECONDS, TOKENS_PER_SECOND, Metric


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of n values."""

    n: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """Cost of a variant's runs; speeds are over the steps of all runs after each run's first tenth.

    Counts and bytes are medians over the runs, which are equal unless the layout changed. The two peaks are
    of rank 0's process (`device` on CUDA only; `host` is resident).
    """

    step_seconds: Quartiles | None
    tokens_per_second: Quartiles | None
    mfu: Quartiles | None
    hfu: Quartiles | None
    size: ModelSize
    states: StateBytes
    peak_device_bytes: int | None
    peak_host_bytes: int | None


def measured_cost(runs: Sequence[FinishedRun]) -> Cost:
    """Summarise the runs of one variant."""
    return Cost(
        step_seconds=_steady(runs, STEP_SECONDS),
        tokens_per_second=_steady(runs, TOKENS_PER_SECOND),
        mfu=_steady(runs, MFU),
        hfu=_steady(runs, HFU),
        size=ModelSize(*_medians([run.size for run in runs])),
        states=StateBytes(*_medians([run.states for run in runs])),
        peak_device_bytes=_peak(runs, DEVICE_BYTES),
        peak_host_bytes=_peak(runs, HOST_BYTES),
    )


def _medians(records: Sequence[ModelSize] | Sequence[StateBytes]) -> list[int]:
    """Return the median of each field over the records, rounded."""
    return [round(float(middle)) for middle in np.median([astuple(record) for record in records], axis=0)]


def quartiles(values: Floats) -> Quartiles | None:
    """Return median and quartiles of the finite values; None if there is none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, median, high = np.percentile(finite, [25, 50, 75])
    return Quartiles(n=len(finite), median=float(median), low=float(low), high=float(high))


def _steady(runs: Sequence[FinishedRun], metric: Metric) -> Quartiles | None:
    parts = [run.curves[metric][run.curves.after(WARM_UP * run.result.steps)] for run in runs]
    return quartiles(np.concatenate(parts))


def _peak(runs: Sequence[FinishedRun], metric: Metric) -> int | None:
    peaks = [np.nanmax(run.curves[metric]) for run in runs if np.isfinite(run.curves[metric]).any()]
    return round(float(np.median(peaks))) if peaks else None
