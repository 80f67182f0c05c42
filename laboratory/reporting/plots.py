"""Style of all plots, and their files.

Readable in print, in grey and by the colour-blind: the colours are those of Okabe and Ito (2008)
and differ in lightness too, and every line has its own dashes or marker besides. The same figure
gives the same bytes.
"""

from __future__ import annotations

import io
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.style import context as style_context
from matplotlib.text import Text

from data_pipeline.io.files import replace_file
from data_pipeline.io.words import shown, shown_in_line

WIDTH = 8.0
"""Inches: the width of a page's text, so that nothing has to be scaled down to be printed."""
NARROW, NARROW_NAME = 4.4, "{}-narrow"
"""Inches of the drawing for a phone, and its name."""
DOTS_PER_INCH = 150

# Okabe and Ito (2008) with wine for yellow, which is lost on white paper; the baseline is black.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#882255")
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (6, 2)),
    (0, (1.2, 0.9)),
    (0, (6, 2, 1, 2)),
    (0, (3, 1.5)),
    (0, (6, 2, 1, 2, 1, 2)),
    (0, (10, 2)),
    (0, (2, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")
GREY = "#767676"
"""Colour of everything that is not data, such as a limit and its label."""
_STYLE: dict[str, Any] = {
    "figure.figsize": (WIDTH, WIDTH),
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.unicode_minus": True,
    "text.parse_math": False,  # a name may have dollars
    "svg.fonttype": "none",
    "svg.hashsalt": "the same figure gives the same bytes",
}

_T = TypeVar("_T")


def page_width() -> float:
    """Return the inches of a figure that is drawn now: WIDTH, or NARROW for a phone."""
    return float(rcParams["figure.figsize"][0])


def in_lines(label: str, width: int = 26) -> str:
    """Break a label at spaces and before an adapter's +, never inside a word.

    Args:
        label: Text of one line.
        width: Longest line, in characters, where no single word is longer.
    """
    words = shown_in_line(label).replace("+", " +")
    lines = textwrap.fill(words, width, break_long_words=False, break_on_hyphens=False)
    return lines.replace(" +", "+")


def style_of(index: int, styles: Sequence[_T]) -> _T:
    """Return the style of a variant; the first style is the baseline's alone.

    Args:
        index: Place of the variant, 0 for the baseline.
        styles: Such as COLOURS; those after the first are used in turn.
    """
    return styles[0] if index == 0 else styles[1 + (index - 1) % (len(styles) - 1)]


def group_style(groups: Sequence[str], group: str) -> tuple[str, str]:
    """Return colour and marker of a group.

    Args:
        groups: All groups of the figure, the baseline first.
        group: One of them.
    """
    index = list(groups).index(group)
    return style_of(index, COLOURS), style_of(index, MARKERS)


def plot_seeds(
    plot: Axes,
    x: Sequence[float],
    values: Sequence[Sequence[float]],
    groups: Sequence[str],
    group: str,
) -> None:
    """Plot mean ± standard deviation over seeds as a line in the style of its group.

    Args:
        plot: Axes to draw on.
        x: `[points]`.
        values: The seeds' values at each x, `[points][seeds]`.
        groups: All groups of the figure, the baseline first.
        group: The group that is drawn.
    """
    colour, marker = group_style(groups, group)
    plot.errorbar(
        x,
        [statistics.mean(seed_values) for seed_values in values],
        yerr=[
            statistics.stdev(seed_values) if len(seed_values) > 1 else 0.0 for seed_values in values
        ],
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.4,
        capsize=2.5,
        label=group,
    )


def remark(
    plot: Axes,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    coordinates: tuple[str, str] = ("axes fraction", "data"),
    **alignment: Any,
) -> None:
    """Write small grey text beside a point.

    Args:
        plot: Axes to write on.
        at: The point.
        offset: Distance from the point to the text, in points.
        coordinates: Systems of `at`, as in `Axes.annotate`: "data" or "axes fraction".
        alignment: `ha` and `va` of the text.
    """
    plot.annotate(
        text,
        at,
        xycoords=coordinates,
        xytext=offset,
        textcoords="offset points",
        fontsize=8,
        color=GREY,
        **alignment,
    )


def write_figures(makers: Mapping[str, Callable[[], Figure | None]], out: Path) -> dict[str, str]:
    """Draw figures and write each as OUT/NAME.png and OUT/NAME.svg.

    Args:
        makers: {name: function that draws the figure}. Where it returns None there is nothing to
            show, and older files of that name are removed.
        out: An existing directory.

    Returns:
        {name: text of the SVG} of the figures that were drawn, and of those that are narrower where
        `page_width` is.
    """
    drawn = _written(makers, out)
    with style_context(["default", _STYLE, {"figure.figsize": (NARROW, NARROW)}]):
        for name, make in makers.items():
            figure = make()
            if figure is not None and figure.get_figwidth() < 0.75 * WIDTH:
                drawn[NARROW_NAME.format(name)] = _shortened(_drawing(figure, "svg").decode())
    return drawn


def _written(makers: Mapping[str, Callable[[], Figure | None]], out: Path) -> dict[str, str]:
    drawn = {}
    with style_context(["default", _STYLE]):
        for name, make in makers.items():
            figure = make()
            for ending in ("svg", "png"):
                path = out / f"{name}.{ending}"
                if figure is None:
                    path.unlink(missing_ok=True)
                    continue
                image = _drawing(figure, ending)
                # The layout is most of the work. It is kept from the SVG, whose texts are widest.
                figure.set_layout_engine("none")
                if ending == "svg":
                    drawn[name] = _shortened(image.decode())
                    image = drawn[name].encode()
                replace_file(path, image, durable=False)
    return drawn


def _drawing(figure: Figure, ending: str) -> bytes:
    """Return the figure as bytes of an SVG or PNG, with unprintable characters escaped."""
    for words in figure.findobj(Text):
        words.set_text(shown(words.get_text()))
    image = io.BytesIO()
    # Date and version would make the bytes of equal figures differ.
    unsaid = {"svg": "Date", "png": "Software"}[ending]
    figure.savefig(image, format=ending, dpi=DOTS_PER_INCH, metadata={unsaid: None})
    return image.getvalue()


def _shortened(svg: str) -> str:
    """Return the SVG with coordinates rounded to tenths of a point."""
    return re.sub(r' (d|x|y)="[^"]+"', lambda match: re.sub(r"(\.\d)\d+", r"\1", match[0]), svg)


def new_figure(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure as wide as a page, and its axes in reading order.

    Args:
        rows: Rows of plots.
        columns: Columns of plots.
        height: Height of a row, in inches.
    """
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for plot in axes:
        plot.grid(axis="x", visible=False)
    return figure, axes


def label(plot: Axes, title: str, x: str, y: str) -> None:
    """Set title and axis labels of a plot that is one of several.

    Args:
        plot: Axes to label.
        title: Set flush left.
        x: Label of the x axis.
        y: Label of the y axis.
    """
    plot.set_title(title, fontsize="medium", loc="left")
    plot.set_xlabel(x)
    plot.set_ylabel(y)


def legend_below(
    figure: Figure | SubFigure, *plots: Axes, rows: int = 1, handle: float = 2.0
) -> None:
    """Draw one legend below a figure, with each name once.

    Args:
        figure: figure or part of a figure that gets the legend.
        plots: Axes whose entries are shown.
        rows: Rows that the legend has at least; more where the width does not hold the entries,
            which fill it column by column.
        handle: Length of an entry's line, in font sizes.
    """
    labelled_lines = [
        zip(*reversed(plot.get_legend_handles_labels()), strict=True) for plot in plots
    ]
    entries = {name: line for names in labelled_lines for name, line in names}
    letters = 11.9 * figure.bbox.width / figure.dpi  # about 0.084 inches each
    most = int(letters - 5 - 1.5 * handle)
    entries = {in_lines(n, most) if len(n) > most else n: line for n, line in entries.items()}
    fitting = max(1, int(letters / (max(map(len, entries)) + 5 + 1.5 * handle)))
    looks: dict[str, Any] = {
        "ncols": min(fitting, -(-len(entries) // rows)),
        "handlelength": handle,
    }
    figure.legend(entries.values(), entries, loc="outside lower center", frameon=False, **looks)
