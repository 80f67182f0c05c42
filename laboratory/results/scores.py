"""Ways to hold attention scores in the modern recipe, from scores.csv of docs/results/modern.

    python -m laboratory.results.scores

Prints of every variant over how many octaves of the rate its mean loss is within 1 % of the best,
and at every rate the losses and, in brackets, the largest scores of its seeds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

import numpy as np

from laboratory.results.tables import RESULTS, table

SCORES = RESULTS / "modern" / "scores" / "scores.csv"
TOLERANCE = 0.01
STEPS_OF_OCTAVE = 100
"""Points of an octave at which the interpolated loss is looked at."""

ByRate = dict[str, dict[float, list[float]]]
"""{variant: {rate: a number of each seed}}"""


def octaves(losses: Mapping[float, float]) -> float:
    """Return over how many octaves of the rate the loss is within TOLERANCE of its best.

    Losses between the rates are interpolated over the rate's logarithm.

    Args:
        losses: {rate: mean loss}.
    """
    rates = sorted(losses)
    places = np.log2(rates)
    count = round(STEPS_OF_OCTAVE * (places[-1] - places[0])) + 1
    fine = np.linspace(places[0], places[-1], count)
    within = np.interp(fine, places, [losses[rate] for rate in rates])
    good = within <= (1 + TOLERANCE) * within.min()
    outside = np.flatnonzero(~good)
    best = int(within.argmin())
    first = max((index + 1 for index in outside if index < best), default=0)
    last = min((index - 1 for index in outside if index > best), default=count - 1)
    return float(fine[last] - fine[first])


def read_scores() -> tuple[ByRate, ByRate]:
    """Return the losses and the largest scores of scores.csv."""
    losses: ByRate = defaultdict(lambda: defaultdict(list))
    scores: ByRate = defaultdict(lambda: defaultdict(list))
    for row in table(SCORES):
        variant = row["variant"]
        rate = float(row["learning_rate"])
        losses[variant][rate].append(float(row["validation_loss"] or math.inf))
        scores[variant][rate].append(float(row["largest_score"]))
    return losses, scores


def main() -> None:
    """Print what is in scores.csv as a table."""
    losses, scores = read_scores()
    for variant, by_rate in losses.items():
        cells = [
            f"{rate:g}: {', '.join(f'{loss:.3f}' for loss in by_rate[rate])} "
            f"({', '.join(f'{score:.0f}' for score in scores[variant][rate])})"
            for rate in sorted(by_rate)
        ]
        span = octaves({rate: fmean(values) for rate, values in by_rate.items()})
        print(f"{variant:16} {span:.1f} octaves;", "; ".join(cells))


if __name__ == "__main__":
    main()
