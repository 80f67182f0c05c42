"""How the gap changes with a subject that is a positive number, such as the layers or the training tokens.

For every seed with a gap at each value x that the variant has, least squares over that seed's gaps gives

    gap = a + b log2(x)

with b in nats per token and doubling. Mean, interval and test of b are over seeds, as those of a gap are:
what runs of one seed share stays paired, and gaps at different values are not taken to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pretrain.study.gaps import SCORES, PairedGap, adjust, paired_gap

TARGET_TOKENS = 100e9
"""What a line over `tokens` is continued to: the pretraining that small runs are to say something about."""
_ROUNDING = 12
"""Decimals of a seed's line that are kept: losses have no more, so the rest is no spread between seeds."""


@dataclass(frozen=True)
class Point:
    """The gap at one value of the subject, over all pairs there; without an interval for a single pair."""

    value: float
    pairs: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Extrapolation:
    """What the seeds' lines give `doublings` beyond the largest value: mean and t-interval over seeds."""

    value: float
    doublings: float
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Trend:
    """The gap of one variant over the values of `subject`, in nats per token.

    `slope.differences` are the b of the seeds in `slope.seeds`, its `t_p_holm` is adjusted over all slopes of
    the report; `intercept` is the mean of a. `residual` is the largest distance of those seeds' mean gaps
    from the mean line, None where two values leave none.
    """

    label: str
    subject: str
    points: tuple[Point, ...]
    slope: PairedGap
    intercept: float
    residual: float | None
    extrapolation: Extrapolation | None

    def line(self, value: float) -> float:
        """The mean line at a value of the subject."""
        return self.intercept + self.slope.mean * math.log2(value)


def subject_numbers(subjects: Mapping[str, Sequence[Any]]) -> list[float] | None:
    """The subject's value in each run, if there is one subject and its values are positive numbers."""
    if len(subjects) != 1:
        return None
    (values,) = subjects.values()
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    good = len(numbers) == len(values) and all(0 < value < math.inf for value in numbers)
    return numbers if good and len(set(numbers)) > 1 else None


def fit_trends(
    subject: str, gaps: Mapping[str, Mapping[float, PairedGap]]
) -> tuple[tuple[Trend, ...], list[str]]:
    """The trend of every variant with gaps at two values or more, and a note on each that has no line.

    Args:
        gaps: {variant's label: {value of the subject: its gap there}}.
    """
    fitted, notes = [], []
    for label, by_value in gaps.items():
        if len(by_value) < 2:
            continue
        trend = _fit(label, subject, dict(sorted(by_value.items())))
        if trend is None:
            notes.append(
                f"No line over {subject} for {label}: fewer than two seeds have a gap at each of its "
                f"{len(by_value)} values."
            )
        else:
            fitted.append(trend)
    slopes = adjust([trend.slope for trend in fitted])
    return tuple(
        replace(trend, slope=slope) for trend, slope in zip(fitted, slopes, strict=True) if slope
    ), notes


def _fit(label: str, subject: str, gaps: Mapping[float, PairedGap]) -> Trend | None:
    by_seed = [dict(zip(gap.seeds, gap.differences, strict=True)) for gap in gaps.values()]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    if len(seeds) < 2:
        return None
    x = np.log2(np.array(list(gaps), dtype=np.float64))
    y = np.array([[at_value[seed] for seed in seeds] for at_value in by_seed])  # [values, seeds]
    design = np.stack([np.ones_like(x), x], axis=1)
    intercepts, slopes = np.linalg.lstsq(design, y, rcond=None)[0].round(_ROUNDING)
    slope = _over_seeds(seeds, slopes)
    distances = y.mean(axis=1) - (intercepts.mean() + slopes.mean() * x)
    extrapolation = None
    doublings = math.log2(TARGET_TOKENS) - float(x[-1])
    if subject == "tokens" and doublings > 0:
        there = _over_seeds(seeds, (intercepts + slopes * math.log2(TARGET_TOKENS)).round(_ROUNDING))
        extrapolation = Extrapolation(TARGET_TOKENS, doublings, there.mean, there.low, there.high)
    return Trend(
        label=label,
        subject=subject,
        points=tuple(Point(value, gap.n, gap.mean, gap.low, gap.high) for value, gap in gaps.items()),
        slope=slope,
        intercept=float(intercepts.mean()),
        residual=float(np.abs(distances).max()) if len(x) > 2 else None,
        extrapolation=extrapolation,
    )


def _over_seeds(seeds: Sequence[int], values: np.ndarray) -> PairedGap:
    """Mean, interval and test against zero; there are two seeds at least."""
    found = paired_gap("0", dict(zip(seeds, values.tolist(), strict=True)), dict.fromkeys(seeds, 0.0), SCORES)
    assert found is not None
    return found
