"""Change of the gap with a subject that is a positive number, such as the layers or the training tokens.

A line gap = a + b log2(x) for every seed with a gap at each value x, by least squares. Mean, interval and
test of b are over seeds: gaps at different values are not taken to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, interval, number, share, signed
from pretrain.study.gaps import CONFIDENCE, SCORES, PairedGap, adjust, paired_gap
from pretrain.study.tables import judged, p_value

_ROUNDING = 12
"""Decimals kept of a seed's line: losses have no more, so the rest is no spread between seeds."""


@dataclass(frozen=True)
class Point:
    """Gap at one value of the subject, over all pairs there; without an interval for a single pair."""

    value: float
    pairs: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Trend:
    """Gap of one variant over the values of `subject`, in nats per token.

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

    def line(self, value: float) -> float:
        """Return the mean line at a value of the subject."""
        return self.intercept + self.slope.mean * math.log2(value)


def subject_numbers(subjects: Mapping[str, Sequence[Any]]) -> list[float] | None:
    """Return the subject's value in each run, if there is one subject and all are positive numbers."""
    if len(subjects) != 1:
        return None
    (values,) = subjects.values()
    numbers = [
        value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    good = len(numbers) == len(values) and all(0 < value < math.inf for value in numbers)
    return numbers if good and len(set(numbers)) > 1 else None


def fit_trends(
    subject: str, gaps: Mapping[str, Mapping[float, PairedGap]]
) -> tuple[tuple[Trend, ...], list[str]]:
    """Return the trend of every variant with gaps at two values or more, and a note on each without a line.

    `gaps`: {variant's label: {value of the subject: its gap there}}.
    """
    fitted, notes = [], []
    for label, by_value in gaps.items():
        trend = _fit(label, subject, dict(sorted(by_value.items())))
        if trend is not None:
            fitted.append(trend)
        elif len(by_value) > 1:
            notes.append(
                f"No line over {subject} for {label}: fewer than two seeds have a gap at each of its "
                f"{len(by_value)} values."
            )
    slopes = adjust([trend.slope for trend in fitted])
    adjusted = [
        replace(trend, slope=slope) for trend, slope in zip(fitted, slopes, strict=True) if slope
    ]
    return tuple(adjusted), notes


def _fit(label: str, subject: str, gaps: Mapping[float, PairedGap]) -> Trend | None:
    by_seed = [dict(zip(gap.seeds, gap.differences, strict=True)) for gap in gaps.values()]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    if len(gaps) < 2 or len(seeds) < 2:
        return None
    x = np.log2(np.array(list(gaps), dtype=np.float64))
    y = np.array([[at_value[seed] for seed in seeds] for at_value in by_seed])  # [values, seeds]
    design = np.stack([np.ones_like(x), x], axis=1)
    intercepts, slopes = np.linalg.lstsq(design, y, rcond=None)[0].round(_ROUNDING)
    slope = _over_seeds(seeds, slopes)
    distances = y.mean(axis=1) - (intercepts.mean() + slopes.mean() * x)
    return Trend(
        label=label,
        subject=subject,
        points=tuple(
            Point(value, gap.n, gap.mean, gap.low, gap.high) for value, gap in gaps.items()
        ),
        slope=slope,
        intercept=float(intercepts.mean()),
        residual=float(np.abs(distances).max()) if len(x) > 2 else None,
    )


def _over_seeds(seeds: Sequence[int], values: np.ndarray) -> PairedGap:
    """Return mean, interval and test against zero of two seeds or more."""
    gap = paired_gap(
        "0", dict(zip(seeds, values.tolist(), strict=True)), dict.fromkeys(seeds, 0.0), SCORES
    )
    assert gap is not None
    return gap


def value_text(value: float) -> str:
    """Return a value of the subject as text: 614,400 or 0.003."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def trend_sentence(trend: Trend) -> str:
    """Return what the line of a variant says."""
    slope, first, last = trend.slope, trend.points[0].value, trend.points[-1].value
    parts = [
        f"{trend.label}, {trend.subject} {value_text(first)} to {value_text(last)}: with each doubling the "
        f"gap changes by {signed(slope.mean)} nats per token ({share(CONFIDENCE)} interval "
        f"{signed(slope.low)} to {signed(slope.high)}), by one line for each of {slope.n} seeds that have a "
        f"gap at all {len(trend.points)} values",
        _slope_verdict(slope),
    ]
    if trend.residual is None:
        parts.append("two values cannot show whether a line fits")
    else:
        parts.append(f"the mean gaps are at most {number(trend.residual)} off the mean line")
    return "; ".join(parts) + "."


def _slope_verdict(slope: PairedGap) -> str:
    direction = "rises" if slope.mean > 0 else "falls"
    return judged(slope, "slopes", f"the gap {direction} significantly", "no significant change")


def trend_table(trends: Sequence[Trend]) -> Table:
    """Return the table of the gaps at each value and the line through them, variant by variant."""
    short = trends[0].subject.rpartition(".")[2]
    values = sorted({point.value for trend in trends for point in trend.points})
    rows = []
    for trend in trends:
        points = {point.value: point for point in trend.points}
        slope = trend.slope
        rows.append(
            (
                trend.label,
                *(_cell(points.get(value)) for value in values),
                str(slope.n),
                signed(slope.mean),
                interval(slope.low, slope.high),
                p_value(slope.t_p, slope.n),
                p_value(slope.t_p_holm, slope.n),
                number(trend.residual),
                _slope_verdict(slope),
            )
        )
    header = (
        "variant",
        *(f"gap at {short}={value_text(value)}" for value in values),
        "seeds of the line",
        "change per doubling",
        f"{share(CONFIDENCE)} interval",
        "t-test p",
        "by Holm",
        "off the line, at most",
        "what may be said",
    )
    return Table(header, rows, text_columns=(0, len(header) - 1))


def _cell(point: Point | None) -> str:
    if point is None:
        return NOTHING
    return signed(point.mean) + ("" if point.low is None else f" {interval(point.low, point.high)}")
