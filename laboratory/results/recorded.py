"""Figures that `evaluate` made, from the report.json beside each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pydantic import TypeAdapter

from laboratory.evaluation.heads import approximation, diversity, length
from laboratory.study.seeds import by_group


@dataclass(frozen=True)
class RecordedLengths(length.RunLengths):
    """Losses of a run by length, as report.json of `evaluate length` has them."""

    gains: Sequence[float] = ()

    def gain(self) -> np.ndarray:
        """Return what context gives, by position in the longest blocks, `[their length]`."""
        return np.array(self.gains)


def draw_lengths(content: Mapping[str, Any]) -> Figure:
    """Draw the figure of `evaluate length` from its report.json."""
    runs = []
    for run in content["runs"]:
        losses = {}
        for factor, record in run["lengths"].items():
            counts = np.full(record["length"], record["predictions"] / record["length"])
            sums = counts * record["loss_by_position"]
            losses[float(factor)] = length.LengthLoss(record["length"], sums, counts)
        facts = {key: run[key] for key in ("name", "group", "seed", "trained_length")}
        gains = run["gain_by_position"]
        runs.append(RecordedLengths(**facts, losses=losses, reasons={}, gains=gains))
    return length.length_figure(by_group(runs), content["tolerance"])


def draw_diversity(content: Mapping[str, Any]) -> Figure:
    """Draw the figure of `evaluate diversity` from its report.json."""
    runs = TypeAdapter(list[diversity.RunDiversity]).validate_python(content["runs"])
    return diversity.diversity_figure(by_group(runs), diversity.Limits(**content["limits"]))


def draw_approximation(content: Mapping[str, Any]) -> Figure:
    """Draw the figure of `evaluate approximation` from its report.json."""
    grid = TypeAdapter(approximation.Grid).validate_python(content["settings"])
    trials = [approximation.Trial(**trial) for trial in content["trials"]]
    report = approximation.approximation_report(grid, trials, content["tolerance"])
    return report.figures["approximation"]()


FROM_JSON: Mapping[str, Callable[[Mapping[str, Any]], Figure]] = {
    "length": draw_lengths,
    "diversity": draw_diversity,
    "approximation": draw_approximation,
}
"""{figure: function that draws it from the content of report.json}"""
