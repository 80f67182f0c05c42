"""Change of the gap with a subject that is a positive number, such as the layers or the training tokens.

For every seed with a gap at each value x that the variant has, least squares over that seed's gaps gives

    gap = a + b log2(x)

with b in nats per token and doubling. Mean, interval and test of b are over seeds, as those of a gap are:
what runs of one seed share stays paired, and gaps at different values are not taken to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, interval, number, share, signed
from pretrain.study.gaps import CONFIDENCE, SCORES, PairedGap, adjust, paired_gap
from pretrain.study.tables import judged, p_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET_TOKENS = 100e9
"""Tokens of the pretraining that small runs are to say something about: lines over `tokens` go so far."""
_ROUNDING = 12
"""Decimals kept of a seed's line: losses have no more, so the rest is no spread between seeds."""
_SHIFT = 0.015
"""Between two variants' points, as a part of the axis, so that their intervals do not hide each other."""


@dataclass(frozen=True)
class Point:
    """Gap at one value of the subject, over all pairs there; without an interval for a single pair."""

    value: float
    pairs: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Extrapolation:
    """Gap by the seeds' lines, `doublings` beyond the largest value: mean and t-interval over seeds."""

    value: float
    doublings: float
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
    extrapolation: Extrapolation | None

    def line(self, value: float) -> float:
        """Return the mean line at a value of the subject."""
        return self.intercept + self.slope.mean * math.log2(value)


def subject_numbers(subjects: Mapping[str, Sequence[Any]]) -> list[float] | None:
    """Return the subject's value in each run, if there is one subject and all are positive numbers."""
    if len(subjects) != 1:
        return None
    (values,) = subjects.values()
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    good = len(numbers) == len(values) and all(0 < value < math.inf for value in numbers)
    return numbers if good and len(set(numbers)) > 1 else None


def fit_trends(
    subject: str, gaps: Mapping[str, Mapping[float, PairedGap]]
) -> tuple[tuple[Trend, ...], list[str]]:
    """Return the trend of every variant with gaps at two values or more, and a note on each without a line.

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
    """Return mean, interval and test against zero of two seeds or more."""
    gap = paired_gap("0", dict(zip(seeds, values.tolist(), strict=True)), dict.fromkeys(seeds, 0.0), SCORES)
    assert gap is not None
    return gap


def value_text(value: float) -> str:
    """Return a value of the subject as text: 614,400 or 0.003."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def trend_sentences(trends: Sequence[Trend]) -> list[str]:
    """Return a sentence for each variant, and a caution on extrapolations if there are any."""
    return [*map(_sentence, trends), *_caution(trends)]


def _sentence(trend: Trend) -> str:
    slope, first, last = trend.slope, trend.points[0].value, trend.points[-1].value
    parts = [
        f"{trend.label}, {trend.subject} {value_text(first)} to {value_text(last)}: with each doubling the "
        f"gap changes by {signed(slope.mean)} nats per token{_interval(slope.low, slope.high)}, by one line "
        f"for each of {slope.n} seeds that have a gap at all {len(trend.points)} values",
        _slope_verdict(slope),
    ]
    if trend.residual is None:
        parts.append("two values cannot show whether a line fits")
    else:
        parts.append(f"the mean gaps are at most {number(trend.residual)} off the mean line")
    there = trend.extrapolation
    if there is not None:
        parts.append(
            f"at {there.value:,.0f} tokens the line gives {signed(there.mean)}"
            f"{_interval(there.low, there.high)}, extrapolated over {there.doublings:.1f} doublings"
        )
    return "; ".join(parts) + "."


def _slope_verdict(slope: PairedGap) -> str:
    direction = "rises" if slope.mean > 0 else "falls"
    return judged(slope, "slopes", f"the gap {direction} significantly", "no significant change")


def _interval(low: float | None, high: float | None) -> str:
    return f" ({share(CONFIDENCE)} interval {signed(low)} to {signed(high)})"


def _caution(trends: Sequence[Trend]) -> list[str]:
    beyond = sorted({trend.extrapolation.doublings for trend in trends if trend.extrapolation})
    if not beyond:
        return []
    span = " or ".join(dict.fromkeys(f"{doublings:.1f}" for doublings in beyond))
    return [
        f"What a line gives there is an extrapolation over {span} doublings beyond the longest runs. Runs of "
        "different length each have their own warm-up and decay of the learning rate, and the interval holds "
        "only if the line does, which these runs cannot show."
    ]


def trend_table(trends: Sequence[Trend]) -> Table:
    """Return the table of the gaps at each value and the line through them, variant by variant."""
    short = trends[0].subject.rpartition(".")[2]
    values = sorted({point.value for trend in trends for point in trend.points})
    far = next((trend.extrapolation for trend in trends if trend.extrapolation), None)
    rows = []
    for trend in trends:
        points = {point.value: point for point in trend.points}
        slope, there = trend.slope, trend.extrapolation
        beyond = NOTHING if there is None else f"{signed(there.mean)} {interval(there.low, there.high)}"
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
                *([beyond] if far else []),
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
        *([f"extrapolated to {far.value:,.0f} tokens"] if far else []),
        "what may be said",
    )
    return Table(header, rows, text_columns=(0, len(header) - 1))


def _cell(point: Point | None) -> str:
    if point is None:
        return NOTHING
    return signed(point.mean) + ("" if point.low is None else f" {interval(point.low, point.high)}")


def trend_figure(trends: Sequence[Trend], labels: Sequence[str], baseline: str) -> Figure | None:
    """Draw the gaps over the subject with their intervals, and each variant's mean line.

    Args:
        labels: of all variants; a variant looks as in the plot of the loss.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

    from pretrain.reporting.plots import WIDTH

    if not trends:
        return None
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    values = sorted({float(point.value) for trend in trends for point in trend.points})
    for place, trend in enumerate(trends):
        aside = (values[-1] / values[0]) ** (_SHIFT * (place - (len(trends) - 1) / 2))
        _draw(axes, trend, aside, labels.index(trend.label))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    many = EngFormatter() if values[-1] >= 1e5 else FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(many)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(f"{trends[0].subject} (logarithmic)")
    axes.set_ylabel(f"gap to {baseline}, nats per token\n(up is worse; {share(CONFIDENCE)} interval)")
    columns = 2 if max(len(trend.label) for trend in trends) < 20 and len(trends) > 1 else 1
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, handlelength=4.5)
    return figure


def _draw(axes: Axes, trend: Trend, aside: float, index: int) -> None:
    from pretrain.reporting.plots import COLOURS, DASHES, MARKERS, style_of

    colour = style_of(index, COLOURS)
    for point in trend.points:
        if point.low is not None and point.high is not None:
            x = point.value * aside
            axes.plot([x, x], [point.low, point.high], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot(
        [point.value * aside for point in trend.points],
        [point.mean for point in trend.points],
        linestyle="none",
        marker=style_of(index, MARKERS),
        markersize=7,
        markerfacecolor="white",
        markeredgewidth=1.6,
        color=colour,
    )
    ends = [trend.points[0].value, trend.points[-1].value]
    slope = f"{signed(trend.slope.mean)} per doubling, n = {trend.slope.n}".replace("-", "−")
    axes.plot(
        [end * aside for end in ends],
        [trend.line(end) for end in ends],
        color=colour,
        linestyle=style_of(index, DASHES),
        linewidth=1.5,
        marker=style_of(index, MARKERS),
        markerfacecolor="white",
        markevery=[],  # the marker is for the legend
        label=f"{trend.label}: {slope}",
    )
