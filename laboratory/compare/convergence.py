"""Convergence: tokens to the baseline's loss, loss variance, gradient norms and their spikes.

All of it is read off the training curves, which have a value for every step; runs of one seed are
compared, because they saw the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laboratory.runs.finished import FinishedRun
from pretrain.reporting.text import Spread, spread
from pretrain.runs.curves import WARM_UP, Floats, RunCurves
from pretrain.runs.tags import GRADIENT_NORM, LOSS

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
SMOOTHING = 0.05
"""A smoothed loss is the mean over this share of a run's records, up to and with its own."""
TAIL = 0.25
"""Loss variance is taken over this last share of the records."""
SPIKE_FACTOR = 2.0
SPIKE_WINDOW = 50
SPIKE_HISTORY = 10
"""A spike is a gradient norm above SPIKE_FACTOR times the median of the SPIKE_WINDOW records before
it (SPIKE_HISTORY of them at least), or one that is not finite."""


@dataclass(frozen=True)
class Reach:
    """Steps and tokens to a smoothed loss of the baseline's run of the same seed.

    Attributes:
        fraction: Share of the baseline's tokens after which it had that loss.
        pairs: Number of pairs of runs.
        reached: Number of runs that got there at all.
        steps: Steps until the loss is reached; None unless all got there, as the next two.
        tokens: Tokens until the loss is reached.
        token_ratio: Tokens until the loss is reached over those that the baseline needed.
    """

    fraction: float
    pairs: int
    reached: int
    steps: Spread | None
    tokens: Spread | None
    token_ratio: Spread | None


@dataclass(frozen=True)
class Stability:
    """Noise of a variant's runs; norms are before clipping, after the learning rate's warm-up.

    Attributes:
        loss_variance: Variance of the training loss about a line through the last quarter of
            the records.
        gradient_norm: Mean over the records of a run.
        gradient_norm_variation: Standard deviation over mean of a run's records.
        spikes: Number of spikes in all runs.
        records: Number of records in which spikes were looked for.
    """

    loss_variance: Spread | None
    gradient_norm: Spread | None
    gradient_norm_variation: Spread | None
    spikes: int
    records: int


def smoothed_loss(curves: RunCurves) -> Floats:
    """Return the trailing mean of the training loss, [records]; NaN where its window is not full.

    A window is not full at the start, and where a loss in it is not finite.
    """
    loss = curves[LOSS]
    width = max(1, round(SMOOTHING * len(loss)))
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(loss))])
    missing = np.concatenate([[0], np.cumsum(np.isnan(loss))])
    smooth = np.full(len(loss), np.nan)
    smooth[width - 1 :] = (sums[width:] - sums[:-width]) / width
    # nan_to_num let the sums pass over losses that are not finite; their windows are void.
    smooth[width - 1 :][missing[width:] > missing[:-width]] = np.nan
    return smooth


def reach(
    fraction: float, runs: Mapping[int, FinishedRun], base: Mapping[int, FinishedRun]
) -> Reach:
    """Return steps and tokens to the loss that the baseline had after a share of its tokens.

    Args:
        fraction: Share of the baseline's tokens.
        runs: {seed: run} of the variant.
        base: {seed: run} of the baseline.
    """
    seeds = sorted(runs.keys() & base.keys())
    hits = []
    for seed in seeds:
        target = _loss_at(base[seed].curves, fraction)
        ours = _first_at_most(runs[seed].curves, target)
        theirs = _first_at_most(base[seed].curves, target)
        if ours is not None and theirs is not None:
            hits.append((*ours, ours[1] / theirs[1]))
    # A mean over the lucky ones would mislead.
    counted = hits if len(hits) == len(seeds) else []
    steps, tokens, ratios = (spread([hit[i] for hit in counted]) for i in range(3))
    return Reach(
        fraction=fraction,
        pairs=len(seeds),
        reached=len(hits),
        steps=steps,
        tokens=tokens,
        token_ratio=ratios,
    )


def _loss_at(curves: RunCurves, fraction: float) -> float:
    """Return the smoothed loss of the last record within this share of the run's tokens."""
    index = int(np.searchsorted(curves.tokens, fraction * curves.tokens[-1], side="right")) - 1
    return float(smoothed_loss(curves)[index]) if index >= 0 else np.nan


def _first_at_most(curves: RunCurves, target: float) -> tuple[int, int] | None:
    """Return (step, tokens) of the first record whose smoothed loss is at most `target`."""
    hits = np.flatnonzero(smoothed_loss(curves) <= target)
    return (int(curves.steps[hits[0]]), int(curves.tokens[hits[0]])) if len(hits) else None


def stability(runs: Sequence[FinishedRun]) -> Stability:
    """Summarise the runs of one variant."""
    norms = [run.curves[GRADIENT_NORM][after_warm_up(run)] for run in runs]
    finite = [values[np.isfinite(values)] for values in norms]
    enough = [values for values in finite if len(values) > 1]
    return Stability(
        loss_variance=spread(
            [v for run in runs if np.isfinite(v := tail_variance(run.curves[LOSS]))]
        ),
        gradient_norm=spread([float(values.mean()) for values in enough]),
        gradient_norm_variation=spread(
            [float(values.std(ddof=1) / values.mean()) for values in enough]
        ),
        spikes=sum(
            int((spikes(run.curves[GRADIENT_NORM]) & after_warm_up(run)).sum())
            for run in runs
            if not np.isnan(run.curves[GRADIENT_NORM]).all()
        ),
        records=sum(len(values) for values in norms),
    )


def after_warm_up(run: FinishedRun) -> NDArray[np.bool_]:
    """Return whether each record is after the first tenth of the steps and the warm-up, [records].

    If the warm-up leaves nothing, the first tenth alone is dropped.
    """
    start = WARM_UP * run.result.steps
    warmed = run.curves.after(max(start, run.config.get("schedule", {}).get("warmup_steps", 0)))
    return warmed if warmed.any() else run.curves.after(start)


def tail_variance(loss: Floats) -> float:
    """Return the variance about a line through the tail, with n - 2 degrees of freedom.

    NaN where the tail is too short, or not finite.
    """
    tail = loss[-max(1, round(TAIL * len(loss))) :]
    if len(tail) < 3 or not np.isfinite(tail).all():
        return float("nan")
    x = np.arange(len(tail), dtype=np.float64)
    slope, intercept = np.polyfit(x, tail, 1)
    return float(((tail - slope * x - intercept) ** 2).sum() / (len(tail) - 2))


def spikes(norms: Floats) -> NDArray[np.bool_]:
    """Return whether each gradient norm is a spike, [records]; see SPIKE_FACTOR."""
    # Comparisons with NaN are false: the first records are no spikes while they are finite.
    usual = np.full(len(norms), np.nan)
    for index in range(SPIKE_HISTORY, min(SPIKE_WINDOW, len(norms))):
        usual[index] = _median(norms[None, :index])[0]
    if len(norms) > SPIKE_WINDOW:
        windows = np.lib.stride_tricks.sliding_window_view(norms[:-1], SPIKE_WINDOW)
        # In chunks, because a median sorts a copy of its windows.
        chunks = np.array_split(windows, -(-len(windows) // 20_000))
        usual[SPIKE_WINDOW:] = np.concatenate([_median(chunk) for chunk in chunks])
    return (norms > SPIKE_FACTOR * usual) | ~np.isfinite(norms)


def _median(windows: Floats) -> Floats:
    """Return the median of the finite values of each row, [rows]; NaN where a row has none."""
    if np.isfinite(windows).all():
        return np.median(windows, axis=1)
    rows = [row[np.isfinite(row)] for row in windows]
    return np.array([np.median(row) if len(row) else np.nan for row in rows])
