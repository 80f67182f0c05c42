"""Figures of the loss by token: the variants' curves and their distance to the baseline; single runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter

from pretrain.compare.comparison import Comparison
from pretrain.compare.convergence import SMOOTHING, smoothed_loss
from pretrain.reporting.plots import (
    COLOURS,
    DASHES,
    MARKERS,
    WIDTH,
    in_lines,
    legend_below,
    style_of,
)
from pretrain.reporting.text import share
from pretrain.runs.curves import Floats
from pretrain.runs.tags import VALIDATION_LOSS
from pretrain.study.seeds import Group

_POINTS = 240
_COLUMNS = 3
_RUN_POINTS = 4000
"""Points of all runs' own curves together, so that their drawing stays small."""
_MOST_BANDS = 3
"""Bands of more variants than this hide each other."""
_SHOWN_FROM = 0.15
"""The loss falls most in the first steps; an axis that showed all of that would show nothing else."""


@dataclass(frozen=True)
class _Curve:
    """Smoothed losses of a group's runs, {seed: [points]}, on the same tokens, [points]."""

    tokens: Floats
    losses: Mapping[int, Floats]

    @property
    def mean(self) -> Floats:
        return np.mean(list(self.losses.values()), axis=0)


def loss_figure(comparison: Comparison) -> Figure | None:
    """Draw two rows of axes, loss and distance to the baseline, with a column for each stratum.

    More variants than there are colours have further such rows, each with the baseline.
    """
    groups = comparison.groups.groups
    strata = list(dict.fromkeys(group.stratum for group in groups))
    labels = comparison.labels
    most = len(COLOURS) - 1
    parts = [[labels[0], *labels[i : i + most]] for i in range(1, max(len(labels), 2), most)]
    with_gap = any(not variant.is_baseline for variant in comparison.variants)
    # Different shapes end at different losses, so each column of a subject has axes of its own.
    size = (max(WIDTH, 3.6 * len(strata)), (6.4 if with_gap else 4.0) * len(parts))
    figure = Figure(figsize=size, layout="constrained")
    for shown, part in zip(parts, figure.subfigures(len(parts), squeeze=False).flat, strict=True):
        _draw_part(part, comparison, shown, with_gap)
    return figure


def _draw_part(
    figure: SubFigure, comparison: Comparison, labels: Sequence[str], with_gap: bool
) -> None:
    """Draw the variants of `labels`, the baseline's first, and their legend."""
    groups = [group for group in comparison.groups.groups if group.label in labels]
    strata = list(dict.fromkeys(group.stratum for group in comparison.groups.groups))
    banded = len(labels) <= _MOST_BANDS + 1
    axes = figure.subplots(
        1 + with_gap,
        len(strata),
        squeeze=False,
        sharex="col",
        height_ratios=(3, 2) if with_gap else (1,),
    )
    for column, stratum in enumerate(strata):
        members = [group for group in groups if group.stratum == stratum]
        curves = {group.name: _curve(group) for group in members}
        for group in members:
            place = labels.index(group.label)
            look = _look(place, len(labels))
            curve, title = curves[group.name], f"{group.label} (n = {len(group.runs)})"
            axes[0][column].plot(curve.tokens, curve.mean, label=title, **look)
            base = comparison.groups.baseline_of(group)
            if with_gap and base.name != group.name:
                _draw_distance(axes[1][column], curve, _curve(base), look, 0 if banded else place)
        _finish(list(axes[:, column]), stratum, list(curves.values()))
    if with_gap:
        spread = f"({'band' if banded else 'bar at the end'}: all seeds)"
        seeds = any(len(group.runs) > 1 for group in groups)
        distance = in_lines(f"distance to {comparison.baseline}", 32)
        axes[1][0].set_ylabel(distance + (f"\n{spread}" if seeds else ""))
    axes[0][0].set_ylabel(f"training loss, nats/token\n(mean of the last {share(SMOOTHING)})")
    legend_below(figure, *axes[0], handle=4.5)


def runs_figure(comparison: Comparison) -> Figure:
    """Draw every run's own training loss, and its validations, in small axes for each variant."""
    groups = comparison.groups.groups
    rows = -(-len(groups) // _COLUMNS)
    points = max(20, min(120, _RUN_POINTS // len(comparison.runs)))
    figure = Figure(figsize=(WIDTH, 0.4 + 1.9 * rows), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False, sharey=True)
    for group, plot in zip(groups, axes.flat, strict=False):
        plot.set_title(f"{in_lines(group.name)} (n = {len(group.runs)})", fontsize="small")
        curves, base = _curve(group, points), _curve(comparison.groups.baseline_of(group), points)
        for run in group.runs:
            plot.plot(curves.tokens, curves.losses[run.seed], color=COLOURS[2], linewidth=0.9)
            held_out = run.curves[VALIDATION_LOSS]
            style = {"color": COLOURS[2], "mfc": "white", "markersize": 3.5}
            there = np.isfinite(held_out)
            plot.plot(run.curves.tokens[there], held_out[there], "o", **style)
        plot.plot(base.tokens, base.mean, color=COLOURS[0], linestyle=DASHES[1], linewidth=0.9)
        _finish([plot], "", [curves, base])
    for plot in axes.flat[len(groups) :]:
        plot.set_axis_off()
    for plot in axes[:, 0]:
        plot.set_ylabel("loss, nats/token")
    return figure


def _curve(group: Group, points: int = _POINTS) -> _Curve:
    end = min(int(run.curves.tokens[-1]) for run in group.runs)
    tokens = np.linspace(end * SMOOTHING, end, points)
    losses = {}
    for run in group.runs:
        smooth = smoothed_loss(run.curves)
        there = np.isfinite(smooth)
        losses[run.seed] = np.interp(tokens, run.curves.tokens[there], smooth[there], left=np.nan)
    return _Curve(tokens, losses)


def _look(index: int, count: int) -> dict[str, Any]:
    """Return the looks of a variant's lines; markers are set off so that they do not hide each other."""
    return {
        "color": style_of(index, COLOURS),
        "linestyle": style_of(index, DASHES),
        "marker": style_of(index, MARKERS),
        "markersize": 5,
        "markerfacecolor": "white",
        "markevery": (_POINTS // 10 + index * (_POINTS // 10) // max(1, count), _POINTS // 10),
        "linewidth": 1.8,
    }


def _draw_distance(
    axes: Axes, curve: _Curve, base: _Curve, look: dict[str, Any], place: int
) -> None:
    """Draw the mean distance and, of several seeds, their spread: a band, or a bar at `place` behind it."""
    seeds = sorted(curve.losses.keys() & base.losses.keys())
    both = curve.tokens <= base.tokens[-1]  # at equal FLOPs one may have seen more tokens
    if not seeds or not both.any():
        return
    tokens = curve.tokens[both]
    rows = [
        curve.losses[seed][both] - np.interp(tokens, base.tokens, base.losses[seed])
        for seed in seeds
    ]
    axes.plot(tokens, np.mean(rows, axis=0), **look)
    low, high = np.min(rows, axis=0), np.max(rows, axis=0)
    if len(seeds) > 1 and place:
        x = tokens[-1] * (1 + 0.012 * place)
        axes.plot(
            [x, x], [low[-1], high[-1]], color=look["color"], linewidth=2.5, solid_capstyle="butt"
        )
    elif len(seeds) > 1:
        axes.fill_between(tokens, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _finish(column: Sequence[Axes], stratum: str, curves: Sequence[_Curve]) -> None:
    top = column[0]
    values = np.concatenate(
        [curve.mean[int(len(curve.tokens) * _SHOWN_FROM) :] for curve in curves]
    )
    values = values[np.isfinite(values)]
    if len(values):
        low, high = float(values.min()), float(values.max())
        margin = 0.05 * max(high - low, 1e-3)
        top.set_ylim(low - margin, high + margin)
    if stratum:
        top.set_title(stratum, fontsize="medium")
    if len(column) > 1:
        if not column[1].lines:  # the baseline alone
            column[1].set_yticks([])
        column[1].axhline(0, color="black", linewidth=0.8)
    column[-1].set_xlabel("training tokens")
    column[-1].xaxis.set_major_formatter(EngFormatter())
