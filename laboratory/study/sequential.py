"""A paired t-test that may be looked at after every pair: interval, answer, and pairs to plan for.

With p_n the ordinary one-sided p value of the paired t-test of the first n differences, a bound at
level a is claimed where p_n ≤ κ(a) / n^1.25, at any n from 5 to 100. Under a true difference at the
bound the sequence p_5 … p_100 has one distribution, whatever the standard deviation is, so κ(a)
makes the probability that any of the 96 looks claims wrongly a itself: repeated confidence
intervals (Jennison and Turnbull, J. R. Statist. Soc. B 51, 1989) at unknown variance. How many
pairs are meant to be made does not enter: stopping, continuing and planning by what has been seen
are all free. κ is from simulated trials (tools/simulations of tag `v0.5-lab`).

An answer "yes" uses bounds at 5 % each, "no" at 2.5 % each, so that either is wrong in at most 5 %
of trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laboratory.study.gaps import FEWEST_SEEDS, NATS, Scale
from laboratory.study.hypothesis import Hypothesis
from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, number, percent, perplexity

FIRST, LAST = FEWEST_SEEDS, 100
"""Pairs at the first and at the last look."""
EXPONENT = 1.25
YES, NO = 0.05, 0.025
"""Levels of each bound from which the answers are read."""
KAPPA = {YES: 0.146, NO: 0.063}
"""A little below 0.1521 and 0.0662: 4,000,000 simulated sequences, less three standard errors."""
EQUAL = 1e-9
"""Nats per token by which equal differences differ at most: what rounding leaves of them."""
POWER = 0.95
STOPPING_RULE = (
    f"judged after every pair of runs from {FIRST} to {LAST} by p_n ≤ κ / n^{EXPONENT}, stopped at "
    "the first answer"
)


@dataclass(frozen=True)
class Decision:
    """State of a trial after n pairs, or at the answer.

    Attributes:
        answer: "yes", "no", or None while undecided.
        n: Pairs that were judged.
        mean: Mean difference, in nats per token.
        sd: Standard deviation of the differences; NaN below two pairs.
        low: Lower bound of the gap, valid at any time, wrong in at most 5 % of trials.
        high: Upper bound; both are infinite before 5 pairs.
    """

    answer: str | None
    n: int
    mean: float
    sd: float
    low: float
    high: float


def bounds(differences: Sequence[float], level: float) -> tuple[float, float]:
    """Return the lower and the upper bound of the gap, valid at any time.

    Args:
        differences: `[pairs]` in nats per token.
        level: Share of trials in which each bound is wrong at most, YES or NO.
    """
    n = len(differences)
    if not FIRST <= n <= LAST:
        return -math.inf, math.inf
    from scipy import stats  # a second, which refusals do not wait for

    mean = float(np.mean(differences))
    error = float(np.std(differences, ddof=1)) / math.sqrt(n)
    distance = float(stats.t.isf(KAPPA[level] / n**EXPONENT, n - 1)) * error
    return mean - distance, mean + distance


def _bounds(
    differences: Sequence[float], level: float, hypothesis: Hypothesis
) -> tuple[float, float]:
    """Return the bounds, infinite where equal differences leave no spread to test against."""
    if hypothesis.question != "within" and len(differences) and np.ptp(differences) < EQUAL:
        return -math.inf, math.inf
    return bounds(differences, level)


def decide(differences: Sequence[float], hypothesis: Hypothesis) -> Decision:
    """Return the first answer of the differences, in the order of their seeds.

    Args:
        differences: `[pairs]`, loss of the design minus loss of the baseline, in nats per token;
            those after the first answer do not count.
    """
    n = 0
    answer = None
    # Pair by pair, as the trial was: later pairs must not revoke its first answer.
    while answer is None and n < len(differences):
        n += 1
        by_level = (_bounds(differences[:n], level, hypothesis) for level in (YES, NO))
        answer = hypothesis.answer(*by_level)
    used = differences[:n]
    low, high = _bounds(used, YES, hypothesis)
    return Decision(
        answer=answer,
        n=n,
        mean=float(np.mean(used)) if n else math.nan,
        sd=float(np.std(used, ddof=1)) if n > 1 else math.nan,
        low=low,
        high=high,
    )


def verdict(claim: Hypothesis, by: Decision, undecided: str) -> str:
    """Return the outcome of a trial as one sentence, without its full stop.

    Args:
        by: Decision of the trial.
        undecided: Text where there is no answer.
    """
    mean, low, high = (percent(perplexity(value)) for value in (by.mean, by.low, by.high))
    return (
        f"{claim.answered(by.answer, undecided)}: after n = {by.n} pairs its perplexity is {mean} "
        f"(interval valid at any time {low} to {high}, each end wrong in at most 5 % of trials)"
    )


def look_table(
    claim: Hypothesis,
    seeds: Sequence[int],
    losses: Sequence[tuple[float, float]],
    scale: Scale = NATS,
) -> Table:
    """Return the table of a trial: every pair, and the bounds after it.

    Args:
        seeds: Seeds of the pairs.
        losses: Losses of the baseline and the design, in nats.
        scale: Unit in which losses are shown.
    """
    differences = [design - baseline for baseline, design in losses]
    rows = []
    for n, (seed, pair) in enumerate(zip(seeds, losses, strict=True), start=1):
        shown = (number(scale.factor * loss, scale.digits) for loss in pair)
        bounds_after = _bounds(differences[:n], YES, claim)
        ends = (NOTHING if n < FIRST else scale.signed(end) for end in bounds_after)
        rows.append((str(n), str(seed), *shown, scale.signed(differences[n - 1]), *ends))
    header = ("pair", "seed", claim.baseline, claim.design, "difference", "gap from", "to")
    return Table(header, rows, text_columns=())


def pairs_needed(sd: float, hypothesis: Hypothesis) -> int:
    """Return the number of pairs by which 95 % of trials give a true "yes", at most LAST.

    The truth planned for is a gap of twice the margin for "better" and "worse", and none for
    "within": as far from what is tested as the margin is wide.

    Args:
        sd: Standard deviation of the differences, from a pilot; the trial's own first pairs may be
            one.
    """
    within = hypothesis.question == "within"
    effect = min(min(map(abs, hypothesis.edges)) / max(sd, 1e-9), 20.0)  # scipy fails far beyond
    power = (1 + POWER) / 2 if within else POWER
    enough = (
        n for n in range(FIRST, LAST) if fixed_power(n, KAPPA[YES] / n**EXPONENT, effect) >= power
    )
    return next(enough, LAST)


def fixed_power(n: int, level: float, effect: float) -> float:
    """Return the power of one one-sided paired t-test.

    Args:
        n: Number of pairs.
        level: Level of the test.
        effect: d_z, mean over standard deviation of the differences.
    """
    from scipy import stats

    return float(stats.nct.sf(stats.t.isf(level, n - 1), n - 1, effect * math.sqrt(n)))
