"""The gap over the subject: points with their intervals, and the mean line of each variant."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from pretrain.compare.comparison import Comparison
from pretrain.compare.trend import Trend
from pretrain.reporting.plots import COLOURS, DASHES, MARKERS, WIDTH, style_of
from pretrain.reporting.text import share, signed
from pretrain.study.gaps import CONFIDENCE

_APART = 0.015
"""Between two variants, as a part of the axis: shifted so much, their intervals do not hide each other."""


def trend_figure(comparison: Comparison) -> Figure | None:
    """One line for each variant that has one; looks are those of the same variant in the plot of the loss."""
    trends = comparison.trends
    if not trends:
        return None
    labels = list(dict.fromkeys(variant.label for variant in comparison.variants))
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    values = sorted({float(point.value) for trend in trends for point in trend.points})
    for place, trend in enumerate(trends):
        aside = (values[-1] / values[0]) ** (_APART * (place - (len(trends) - 1) / 2))
        _draw(axes, trend, aside, labels.index(trend.label))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    many = EngFormatter() if values[-1] >= 1e5 else FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(many)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(f"{trends[0].subject} (logarithmic)")
    axes.set_ylabel(
        f"gap to {comparison.baseline}, nats per token\n(up is worse; {share(CONFIDENCE)} interval)"
    )
    columns = 2 if max(len(trend.label) for trend in trends) < 20 and len(trends) > 1 else 1
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, handlelength=4.5)
    return figure


def _draw(axes: Axes, trend: Trend, aside: float, index: int) -> None:
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
