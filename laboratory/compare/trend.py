"""Change of the gap with a subject that is a positive number, such as layers or training tokens.

A line gap = a + b log2(x) for every seed with a gap at each value x, by least squares. Mean,
interval and test of b are over seeds: gaps at different values are not taken to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from laboratory.study.gaps import CONFIDENCE, PairedGap, adjust, mean_over_seeds
from laboratory.study.tables import GAP, INTERVAL, PAIRS, T_HOLM, T_P, gap_text, judged
from pretrain.reporting.tables import REMARKS, Column, Table, table_of
from pretrain.reporting.text import number, share, signed

_ROUNDING = 12
"""Decimals kept of a seed's line: losses have no more, so the rest is no spread between seeds."""


@dataclass(frozen=True)
class Trend:
    """Gap of one variant over the values of a subject, in nats per token.

    Attributes:
        label: Label of the variant.
        subject: Key of the config, or `tokens`.
        gaps: {value of the subject: gap there}, by ascending value.
        slope: `differences` are the b of its `seeds`; `t_p_holm` is adjusted over all slopes of the
            report.
        intercept: Mean of a.
        residual: Largest distance of those seeds' mean gaps from the mean line; None where two
            values leave none.
    """

    label: str
    subject: str
    gaps: Mapping[float, PairedGap]
    slope: PairedGap
    intercept: float
    residual: float | None

    @property
    def gap(self) -> PairedGap:
        """Return the slope, for the columns of tables of gaps."""
        return self.slope


def subject_numbers(subjects: Mapping[str, Sequence[Any]]) -> list[float] | None:
    """Return the subject's value in each run; None unless one subject has positive numbers."""
    if len(subjects) != 1:
        return None
    (values,) = subjects.values()
    numbers = [
        value
        for value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    ]
    return numbers if len(numbers) == len(values) and len(set(numbers)) > 1 else None


def fit_trends(
    subject: str, gaps: Mapping[str, Mapping[float, PairedGap]]
) -> tuple[tuple[Trend, ...], list[str]]:
    """Fit a line for every variant with gaps at two values or more.

    Args:
        gaps: {variant's label: {value of the subject: its gap there}}.

    Returns:
        The trends, and a note on each variant without a line.
    """
    fitted = []
    notes = []
    for label, by_value in gaps.items():
        trend = _fit(label, subject, dict(sorted(by_value.items())))
        if trend is not None:
            fitted.append(trend)
        elif len(by_value) > 1:
            notes.append(
                f"No line over {subject} for {label}: fewer than two seeds have a gap at each of "
                f"its {len(by_value)} values."
            )
    # Holm's correction is over all slopes of the report.
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
    # One solve for all seeds: each column of y is a seed.
    intercepts, slopes = np.linalg.lstsq(design, y, rcond=None)[0].round(_ROUNDING)
    by_slope = dict(zip(seeds, slopes.tolist(), strict=True))
    slope = mean_over_seeds(by_slope)
    assert slope is not None
    distances = y.mean(axis=1) - (intercepts.mean() + slopes.mean() * x)
    return Trend(
        label=label,
        subject=subject,
        gaps=gaps,
        slope=slope,
        intercept=float(intercepts.mean()),
        residual=float(np.abs(distances).max()) if len(x) > 2 else None,
    )


def value_text(value: float) -> str:
    """Return a value of the subject as text: 614,400 or 0.003."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def trend_sentence(trend: Trend) -> str:
    """Return the line of a variant as a sentence."""
    slope = trend.slope
    first, *_, last = map(value_text, trend.gaps)
    parts = [
        f"{trend.label}, {trend.subject} {first} to {last}: with each doubling the gap changes by "
        f"{signed(slope.mean)} nats per token ({share(CONFIDENCE)} interval {signed(slope.low)} to "
        f"{signed(slope.high)}), by one line for each of {slope.n} seeds that have a gap at all "
        f"{len(trend.gaps)} values",
        _slope_verdict(trend),
    ]
    if trend.residual is None:
        parts.append("two values cannot show whether a line fits")
    else:
        parts.append(f"the mean gaps are at most {number(trend.residual)} off the mean line")
    return "; ".join(parts) + "."


def _slope_verdict(trend: Trend) -> str:
    direction = "rises" if trend.slope.mean > 0 else "falls"
    claim = f"the gap {direction} significantly"
    return judged(trend.slope, "slopes", claim, "no significant change")


def trend_table(trends: Sequence[Trend]) -> Table:
    """Return the gaps at each value and the line through them, variant by variant."""
    short = trends[0].subject.rpartition(".")[2]
    values = sorted({value for trend in trends for value in trend.gaps})
    columns: list[Column[Trend]] = [
        Column("variant", lambda trend: trend.label, in_words=True),
        *(_gap_at(f"gap at {short}={value_text(value)}", value) for value in values),
        replace(PAIRS, title="seeds of the line"),
        replace(GAP, title="change per doubling"),
        INTERVAL,
        T_P,
        T_HOLM,
        Column("off the line, at most", lambda trend: number(trend.residual)),
        Column(REMARKS, _slope_verdict, in_words=True),
    ]
    return table_of(trends, columns)


def _gap_at(title: str, value: float) -> Column[Trend]:
    return Column(title, lambda trend: gap_text(trend.gaps.get(value)))
