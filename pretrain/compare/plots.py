"""Plots of a comparison: loss by token, gap with intervals, trend, memory, throughput.

The style is `reporting.plots`'; every part of a bar has its own hatching besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.loss_plot import loss_figure, runs_figure
from pretrain.compare.trend import Trend
from pretrain.reporting.plots import (
    COLOURS,
    DASHES,
    GREY,
    MARKERS,
    WIDTH,
    group_style,
    in_lines,
    legend_below,
    remark,
    style_of,
)
from pretrain.reporting.text import byte_count, percent, share, signed
from pretrain.study.gaps import CONFIDENCE

_SHIFT = 0.015
"""Between two variants' points of a trend, as a part of the axis, so that no interval hides another."""


def figures(comparison: Comparison) -> dict[str, Callable[[], Figure | None]]:
    """Return a function for each figure; None of one means that there is nothing to show."""
    return {
        "loss": lambda: loss_figure(comparison),
        "runs": lambda: runs_figure(comparison),
        "gap": lambda: gap_figure(comparison),
        "frontier": lambda: frontier_figure(comparison),
        "trend": lambda: trend_figure(comparison),
        "memory": lambda: memory_figure(comparison),
        "throughput": lambda: throughput_figure(comparison),
    }


def gap_figure(comparison: Comparison) -> Figure | None:
    """Draw each variant's gap with its 95 % interval, and the single pairs behind it."""
    variants = [variant for variant in comparison.variants if variant.gap is not None]
    if not variants:
        return None
    figure, axes = _rows(variants, f"{comparison.gap_to} in nats per token (right is worse)")
    axes.axvline(0, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    for row, variant in enumerate(variants):
        gap = variant.gap
        assert gap is not None
        axes.plot(gap.differences, [row + 0.22] * gap.n, "o", ms=4, mfc="white", mec="#555555")
        if gap.low is not None and gap.high is not None:
            axes.plot(
                [gap.low, gap.high],
                [row, row],
                color=COLOURS[1],
                linewidth=3,
                solid_capstyle="butt",
            )
        axes.plot([gap.mean], [row], "D", markersize=7, color="black")
        text = f"{signed(gap.mean, 3)}  ({percent(gap.perplexity_ratio)} perplexity), n = {gap.n}"
        _note_at_right(axes, row, text)
    _legend_below(
        figure,
        [("D", "black", "mean", True), ("o", "#555555", "one pair of runs of one seed", False)],
        line=(COLOURS[1], "95 % interval of the mean"),
    )
    return figure


def frontier_figure(comparison: Comparison) -> Figure | None:
    """Draw each variant's gap over the compute that it saves, and the gap at which both break even."""
    shown = [v for v in comparison.others if v.compute and v.compute.cost and v.gap]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 4.0 + 0.22 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    saved = [100 * (1 - v.compute.cost) for v in shown if v.compute and v.compute.cost]
    x = np.linspace(min(0.0, *saved) - 0.5, max(0.0, *saved) + 1, 50)
    slopes = {v.stratum: v.compute.slope for v in shown if v.compute and v.compute.slope}
    for place, (stratum, slope) in enumerate(slopes.items()):
        even = (-slope if comparison.match == "tokens" else 0.0) * np.log2(1 - x / 100)
        text = f"break-even {stratum}".strip() + f": {slope:.2f} nats a doubling of tokens"
        axes.plot(x, even, color=GREY, ls=DASHES[place % len(DASHES)], lw=1.2, label=text)
    if slopes:
        remark(
            axes,
            "below: cheaper to the same loss",
            (0.99, 0.02),
            (0, 0),
            ("axes fraction",) * 2,
            ha="right",
        )
    axes.plot([0], [0], MARKERS[0], color=COLOURS[0], markersize=7, label=comparison.baseline)
    for place, variant in enumerate(shown):
        beside = [
            other
            for other, value in enumerate(saved)
            if abs(value - saved[place]) < 0.01 * np.ptp(x)
        ]
        aside = _SHIFT * np.ptp(x) * (beside.index(place) - (len(beside) - 1) / 2)
        _draw_price(axes, saved[place] + aside, variant, comparison.labels, len(slopes) > 1)
    axes.set_xlabel(f"{comparison.compute_unit} a token saved, % (right is cheaper)")
    gap_to = in_lines(f"{comparison.gap_to}, nats per token", 50)
    axes.set_ylabel(f"{gap_to}\n(up is worse; {share(CONFIDENCE)} interval, – a seed)")
    legend_below(figure, axes)
    return figure


def _draw_price(
    axes: Axes, x: float, variant: Variant, labels: Sequence[str], in_strata: bool
) -> None:
    gap, (colour, marker) = variant.gap, group_style(labels, variant.label)
    assert gap is not None
    if gap.low is not None and gap.high is not None:
        axes.plot([x, x], [gap.low, gap.high], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot([x] * gap.n, gap.differences, "_", color=colour, markersize=7, alpha=0.7)
    named = variant.label if in_strata else variant.name
    axes.plot([x], [gap.mean], marker, color=colour, mfc="white", mew=1.6, label=named)
    if in_strata:
        remark(axes, variant.stratum, (x, gap.mean), (7, 0), ("data", "data"), va="center")


def trend_figure(comparison: Comparison) -> Figure | None:
    """Draw the gaps over the subject with their intervals, and each variant's mean line."""
    if not (trends := comparison.trends):
        return None
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    values = sorted({float(point.value) for trend in trends for point in trend.points})
    for place, trend in enumerate(trends):
        aside = (values[-1] / values[0]) ** (_SHIFT * (place - (len(trends) - 1) / 2))
        _draw_trend(axes, trend, aside, comparison.labels.index(trend.label))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    many = EngFormatter() if values[-1] >= 1e5 else FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(many)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(f"{trends[0].subject} (logarithmic)")
    named = in_lines(f"{comparison.gap_to}, nats per token", 50)
    axes.set_ylabel(f"{named}\n(up is worse; {share(CONFIDENCE)} interval)")
    legend_below(figure, axes, handle=4.5)
    return figure


def _draw_trend(axes: Axes, trend: Trend, aside: float, index: int) -> None:
    colour = style_of(index, COLOURS)
    for point in trend.points:
        if point.low is not None and point.high is not None:
            x = point.value * aside
            axes.plot(
                [x, x], [point.low, point.high], color=colour, linewidth=2, solid_capstyle="butt"
            )
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


def memory_figure(comparison: Comparison) -> Figure:
    """Draw the bytes of model states by kind, summed over ranks, as the live engine held them."""
    variants = list(comparison.variants)
    kinds: tuple[tuple[str, str, str, Callable[[Variant], int]], ...] = (
        ("weights that train", "#0072B2", "", lambda v: v.cost.states.weight_bytes),
        ("frozen bank", "#F0E442", "xx", lambda v: v.cost.states.frozen_bytes),
        ("gradients", "#E69F00", "//", lambda v: v.cost.states.gradient_bytes),
        ("optimizer state", "#D0D0D0", "--", lambda v: v.cost.states.optimizer_state_bytes),
    )
    figure, axes = _rows(variants, "memory of model states, all ranks together")
    left = [0.0] * len(variants)
    for title, colour, hatch, of in kinds:
        widths = [float(of(variant)) for variant in variants]
        bar: dict[str, Any] = {
            "color": colour,
            "hatch": hatch,
            "label": title,
            "edgecolor": "black",
            "linewidth": 0.6,
        }
        axes.barh(range(len(variants)), widths, 0.6, left, **bar)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, (variant, total) in enumerate(zip(variants, left, strict=True)):
        base_total = comparison.variant(variant.baseline).cost.states.in_memory
        change = "" if total == base_total else f"  ({percent(total / base_total)})"
        _note_at_right(axes, row, byte_count(total) + change)
    _byte_ticks(axes, max(left))
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def throughput_figure(comparison: Comparison) -> Figure | None:
    """Draw tokens per second: median and quartiles of the steady steps, and the speed by FLOPs alone."""
    variants = [
        variant for variant in comparison.variants if variant.cost.tokens_per_second is not None
    ]
    if not variants:
        return None
    figure, axes = _rows(variants, "tokens per second")
    markers = [("D", "black", "median step", True)]
    for row, variant in enumerate(variants):
        speed, base = variant.cost.tokens_per_second, comparison.variant(variant.baseline)
        assert speed is not None
        axes.plot(
            [speed.low, speed.high],
            [row, row],
            color=COLOURS[2],
            linewidth=6,
            solid_capstyle="butt",
        )
        axes.plot([speed.median], [row], "D", markersize=7, color="black")
        change = ""
        if not variant.is_baseline and base.cost.tokens_per_second is not None:
            change = f"  ({percent(speed.median / base.cost.tokens_per_second.median)})"
            if variant.theory and base.theory:
                ratio = (
                    base.theory.executed_flops_per_token / variant.theory.executed_flops_per_token
                )
                expected = base.cost.tokens_per_second.median * ratio
                axes.plot([expected], [row - 0.25], "v", ms=7, mfc="white", mec="black")
                markers[1:] = [("v", "black", "if time went with FLOPs", False)]
        _note_at_right(axes, row, f"{speed.median:,.0f}{change}")
    axes.xaxis.set_major_formatter(EngFormatter())
    _legend_below(figure, markers, line=(COLOURS[2], "middle half of the steps"))
    return figure


def _rows(variants: Sequence[Variant], title: str) -> tuple[Figure, Axes]:
    """Return a figure with one row for each variant, the first on top."""
    names = [
        f"{in_lines(variant.label)}\n{in_lines(variant.stratum)}".strip() for variant in variants
    ]
    row = max(0.55, 0.18 * max(len(name.splitlines()) for name in names))  # inches
    figure = Figure(figsize=(WIDTH, 1.5 + row * len(variants)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(variants)), names)
    axes.set_ylim(len(variants) - 0.45, -0.55)
    axes.set_xlabel(in_lines(title, 95))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    return figure, axes


def _note_at_right(axes: Axes, row: int, text: str) -> None:
    axes.annotate(
        text.replace("-", "−"),
        (1.0, row),
        (6, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize="small",
        annotation_clip=False,
    )


def _byte_ticks(axes: Axes, largest: float) -> None:
    """Set ticks at round numbers of the binary unit that suits the longest bar."""
    power = max(0, min(4, int(math.log(max(largest, 1), 1024))))
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, largest / 1024**power)
    steps = [step for step in ticks if step >= 0]
    axes.set_xticks([step * 1024**power for step in steps], [f"{step:g}" for step in steps])
    axes.set_xlim(0, largest * 1.02)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    axes.set_xlabel(f"memory of model states, all ranks together, {unit}")


def _legend_below(
    figure: Figure, markers: Sequence[tuple[str, str, str, bool]], line: tuple[str, str]
) -> None:
    """Draw a legend of `markers` (marker, colour, text, filled) and of a `line` (colour, text)."""
    handles = [
        Line2D(
            [], [], marker=m, color=colour, ls="none", label=text, mfc=colour if filled else "white"
        )
        for m, colour, text, filled in markers
    ]
    handles.append(Line2D([], [], color=line[0], linewidth=4, label=line[1]))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
