"""The report of `step_time.py` as a picture: the ratios, and what each contender's step is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.step.parts import PARTS
from pretrain.reporting.plots import COLOURS, GREY, label, new_figure, write_figures


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Write the PNG at `path`."""
    write_figures({path.stem: lambda: _figure(report)}, path.parent)


def _figure(report: dict[str, Any]) -> Figure:
    figure, (ratios, parts) = new_figure(1, 2, 3.2)
    base = next(iter(report["ratio"]))
    found = report["ratio"][base]
    places = range(len(found))
    medians = [one["median"] for one in found.values()]
    low = [one["median"] - one["low"] for one in found.values()]
    high = [one["high"] - one["median"] for one in found.values()]
    ratios.errorbar(medians, places, xerr=(low, high), fmt="o", color=COLOURS[2], capsize=3)
    ratios.axvline(1.0, color=GREY, linewidth=0.8)
    ratios.set_yticks(places, list(found))
    ratios.invert_yaxis()
    label(ratios, f"Step time / {base}'s, median and quartiles", "ratio", "")
    names = list(report["parts"])
    left = [0.0] * len(names)
    for colour, part in zip(COLOURS[1:], PARTS, strict=False):
        widths = [1e3 * report["parts"][name][part] for name in names]
        parts.barh(names, widths, left=left, color=colour, label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    parts.invert_yaxis()
    label(parts, f"Parts of a step, {report['shape']}", f"ms ({report['clock']} clock)", "")
    figure.legend(*parts.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure
