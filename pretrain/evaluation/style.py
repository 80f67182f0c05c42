"""How plots look: readable in print, and by the colour-blind (colour and marker tell groups apart)."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette (2008), without its yellow, which white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#767676"
_TEXT = MappingProxyType({"size": 9})


def new_figure(rows: int, columns: int, width: float = 8.0, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` × `columns` plots, `height` inches a row, and its axes in reading order."""
    figure = Figure(figsize=(width, height * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for plot in axes.flat:
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(axis="y", color="#e3e3e3", linewidth=0.6)
        plot.set_axisbelow(True)
        plot.tick_params(labelsize=_TEXT["size"])
    return figure, list(axes.flat)


def label(plot: Axes, title: str, x: str, y: str) -> None:
    """Title and axes in the sizes that all plots share."""
    plot.set_title(title, fontsize=10, loc="left")
    plot.set_xlabel(x, fontsize=_TEXT["size"])
    plot.set_ylabel(y, fontsize=_TEXT["size"])


def legend_below(figure: Figure, plot: Axes, rows: int = 1) -> None:
    """One legend for all plots of a figure, under them, from the entries of one of them.

    Entries fill it column by column, `rows` at least, and more where the width does not hold them.
    """
    handles, names = plot.get_legend_handles_labels()
    fitting = max(1, 95 // (max(map(len, names)) + 8))
    columns = min(fitting, -(-len(names) // rows))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def group_style(groups: Sequence[str], group: str) -> tuple[str, str]:
    """(colour, marker) of a group, by its place among all."""
    place = list(groups).index(group)
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
