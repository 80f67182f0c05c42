"""Figures of a comparison: loss by token, and gap.

The style is that of `reporting.plots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter

from laboratory.compare.comparison import Comparison, Variant
from laboratory.compare.convergence import SMOOTHING, smoothed_loss
from laboratory.reporting.plots import (
    COLOURS,
    DASHES,
    MARKERS,
    WIDTH,
    in_lines,
    legend_below,
    page_width,
    remark,
    style_of,
)
from laboratory.study.gaps import PairedGap
from laboratory.study.seeds import Group
from pretrain.reporting.text import percent, share, signed
from pretrain.runs.curves import Floats

_POINTS = 240
_MOST_BANDS = 3
"""Bands of more variants than this hide each other."""
_SHOWN_FROM = 0.15
"""The loss falls most in the first steps; an axis that showed all of that would show only that."""


def figures(comparison: Comparison) -> dict[str, Callable[[], Figure | None]]:
    """Return {name: function that draws the figure}, which returns None for nothing to show."""
    gaps = {_row_name(variant): variant.gap for variant in comparison.variants if variant.gap}
    axis = f"{comparison.gap_to} in nats per token"
    return {"loss": lambda: loss_figure(comparison), "gap": lambda: gap_figure(gaps, axis)}


def _row_name(variant: Variant) -> str:
    return f"{in_lines(variant.label)}\n{in_lines(variant.stratum)}".strip()


# The training loss


@dataclass(frozen=True)
class _Curve:
    """Smoothed losses of a group's runs, {seed: [points]}, on the same tokens, [points]."""

    tokens: Floats
    losses: Mapping[int, Floats]

    @property
    def mean(self) -> Floats:
        return np.mean(list(self.losses.values()), axis=0)

    def minus(self, base: _Curve) -> tuple[Floats, Floats]:
        """Return tokens, [points], and the distance of each seed that both have, [seeds, points].

        At equal FLOPs one may have seen more tokens: the distance ends where the baseline does.
        """
        tokens = self.tokens[self.tokens <= base.tokens[-1]]
        rows = [
            self.losses[seed][: len(tokens)] - np.interp(tokens, base.tokens, base.losses[seed])
            for seed in sorted(self.losses.keys() & base.losses.keys())
        ]
        return tokens, np.reshape(rows, (-1, len(tokens)))


def loss_figure(comparison: Comparison) -> Figure:
    """Draw two rows of axes, loss and distance to the baseline, with a column for each stratum.

    More variants than there are colours have further such rows, each with the baseline.
    """
    labels = comparison.labels
    most = len(COLOURS) - 1
    parts = [[labels[0], *labels[i : i + most]] for i in range(1, max(len(labels), 2), most)]
    # Different shapes end at different losses, so each column of a subject has axes of its own.
    width = max(page_width(), 3.6 * len(comparison.strata))
    height = 6.4 if comparison.others else 4.0
    figure = Figure(figsize=(width, height * len(parts)), layout="constrained")
    for shown, part in zip(parts, figure.subfigures(len(parts), squeeze=False).flat, strict=True):
        _draw_part(part, comparison, shown)
    return figure


def _draw_part(figure: SubFigure, comparison: Comparison, labels: Sequence[str]) -> None:
    """Draw the variants of `labels`, the baseline's first, and their legend."""
    groups = [group for group in comparison.groups.groups if group.label in labels]
    rows = 2 if comparison.others else 1
    axes = figure.subplots(
        rows, len(comparison.strata), squeeze=False, sharex="col", height_ratios=(3, 2)[:rows]
    )
    banded = len(labels) <= _MOST_BANDS + 1
    for column, stratum in enumerate(comparison.strata):
        members = [group for group in groups if group.stratum == stratum]
        curves = {group.name: _curve(group) for group in members}
        for group in members:
            index = labels.index(group.label)
            look = _look(index, len(labels))
            curve = curves[group.name]
            title = f"{group.label} (n = {len(group.runs)})"
            axes[0][column].plot(curve.tokens, curve.mean, label=title, **look)
            base = comparison.groups.baseline_of(group)
            if base.name != group.name:
                tokens, distances = curve.minus(_curve(base))
                behind = 0 if banded else index
                _draw_distance(axes[1][column], tokens, distances, look=look, position=behind)
        _finish(list(axes[:, column]), stratum, list(curves.values()))
    if comparison.others:
        spread = f"\n({'band' if banded else 'bar at the end'}: all seeds)"
        seeds = any(len(group.runs) > 1 for group in groups)
        distance = in_lines(f"distance to {comparison.baseline}", 32)
        axes[1][0].set_ylabel(distance + (spread if seeds else ""))
    axes[0][0].set_ylabel(f"training loss, nats/token\n(mean of the last {share(SMOOTHING)})")
    legend_below(figure, *axes[0], handle=4.5)


def _curve(group: Group) -> _Curve:
    end = min(int(run.curves.tokens[-1]) for run in group.runs)
    tokens = np.linspace(end * SMOOTHING, end, _POINTS)
    losses = {}
    for run in group.runs:
        smooth = smoothed_loss(run.curves)
        finite = np.isfinite(smooth)
        # One grid of tokens for all seeds, so that their mean and spread are pointwise.
        losses[run.seed] = np.interp(tokens, run.curves.tokens[finite], smooth[finite], left=np.nan)
    return _Curve(tokens, losses)


def _look(index: int, count: int) -> dict[str, Any]:
    """Return the style of a variant's line, with markers shifted so that none hides another."""
    apart = _POINTS // 10
    return {
        "color": style_of(index, COLOURS),
        "linestyle": style_of(index, DASHES),
        "marker": style_of(index, MARKERS),
        "markersize": 5,
        "markerfacecolor": "white",
        "markevery": (apart + index * apart // max(1, count), apart),
        "linewidth": 1.8,
    }


def _draw_distance(
    axes: Axes, tokens: Floats, distances: Floats, look: Mapping[str, Any], position: int
) -> None:
    """Draw the mean, and the spread of several seeds: a band, or a bar at `position` behind it."""
    if not distances.size:
        return
    axes.plot(tokens, distances.mean(axis=0), **look)
    low = distances.min(axis=0)
    high = distances.max(axis=0)
    if len(distances) > 1 and position:
        _draw_bar(axes, tokens[-1] * (1 + 0.012 * position), (low[-1], high[-1]), look["color"])
    elif len(distances) > 1:
        axes.fill_between(tokens, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _finish(column: Sequence[Axes], stratum: str, curves: Sequence[_Curve]) -> None:
    top = column[0]
    shown = [curve.mean[int(len(curve.tokens) * _SHOWN_FROM) :] for curve in curves]
    values = np.concatenate(shown)
    values = values[np.isfinite(values)]
    if len(values):
        margin = 0.05 * max(float(np.ptp(values)), 1e-3)
        top.set_ylim(float(values.min()) - margin, float(values.max()) + margin)
    if stratum:
        top.set_title(stratum, fontsize="medium")
    if len(column) > 1:
        if not column[1].lines:  # the baseline alone
            column[1].set_yticks([])
        column[1].axhline(0, color="black", linewidth=0.8)
    column[-1].set_xlabel("training tokens")
    column[-1].xaxis.set_major_formatter(EngFormatter())


# Gaps


def _draw_bar(axes: Axes, x: float, ends: tuple[float, float], colour: str) -> None:
    axes.plot([x, x], ends, color=colour, linewidth=2.5, solid_capstyle="butt")


def gap_figure(gaps: Mapping[str, PairedGap], axis: str) -> Figure | None:
    """Draw gaps with their 95 % intervals, and the single pairs behind them.

    Args:
        gaps: {name, broken into lines: gap}.
        axis: Label of the axis.
    """
    if not gaps:
        return None
    row_height = max(0.55, 0.18 * max(len(name.splitlines()) for name in gaps))  # inches
    figure = Figure(figsize=(page_width(), 1.5 + row_height * len(gaps)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    pair: dict[str, Any] = {
        "mfc": "white",
        "mec": "#555555",
        "label": "one pair of runs of one seed",
    }
    bar: dict[str, Any] = {
        "color": COLOURS[1],
        "linewidth": 3,
        "label": "95 % interval of the mean",
    }
    for row, gap in enumerate(gaps.values()):
        factor = gap.scale.factor
        # First, so that the legend begins with the mean; drawn last, over the interval.
        axes.plot(
            [factor * gap.mean], [row], "D", markersize=7, color="black", label="mean", zorder=3
        )
        axes.plot(
            np.multiply(factor, gap.differences), [row + 0.22] * gap.n, "o", markersize=4, **pair
        )
        if gap.low is not None and gap.high is not None:
            ends = [factor * gap.low, factor * gap.high]
            axes.plot(ends, [row, row], solid_capstyle="butt", **bar)
        mean = signed(factor * gap.mean, 3)
        text = f"{mean}  ({percent(gap.perplexity_ratio)} perplexity), n = {gap.n}"
        lines = text if page_width() == WIDTH else text.replace("  ", "\n").replace(", ", "\n")
        remark(axes, lines.replace("-", "−"), at=(1.0, row), offset=(6, 0), va="center")
    axes.set_yticks(range(len(gaps)), list(gaps))
    axes.set_ylim(len(gaps) - 0.45, -0.55)
    axes.set_xlabel(in_lines(f"{axis} (right is worse)", int(95 * page_width() / WIDTH)))
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=6)  # labels of five decimals stand apart
    axes.grid(axis="y", visible=False)
    legend_below(figure, axes)
    return figure
