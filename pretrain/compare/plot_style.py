"""What the plots have in common: sizes, colours, dashes, markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

WIDTH = 8.0
"""Inches: the width of a page's text, so that nothing has to be scaled down to be printed."""
LABEL_WIDTH = 26

# Okabe and Ito (2008) without yellow, which is lost on white paper; the baseline is black.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
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

_T = TypeVar("_T")


def style_of(index: int, styles: Sequence[_T]) -> _T:
    """The first style for the baseline alone, the others in turn for the other variants."""
    return styles[0] if index == 0 else styles[1 + (index - 1) % (len(styles) - 1)]


RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "axes.unicode_minus": True,
}
