"""What is said of quartiles, p values and gaps, the same in the report and on the console."""

from __future__ import annotations

import math

from pretrain.compare.cost import Quartiles
from pretrain.compare.significance import CONFIDENCE, FEWEST_SEEDS, LEVEL, PairedGap
from pretrain.reporting.text import NOTHING, number, percent, share, signed

NOT_FINITE = "not finite"
"""In place of the mean of a loss that no run has."""


def quartile_text(value: Quartiles | None, digits: int) -> str:
    """median [first quartile, third quartile]"""
    if value is None:
        return NOTHING
    low, high = number(value.low, digits), number(value.high, digits)
    return f"{number(value.median, digits)} [{low}, {high}]"


def p_value(p: float | None, n: int = FEWEST_SEEDS) -> str:
    """Not shown for fewer pairs than a claim takes, where it would only be mistaken for one."""
    if n < FEWEST_SEEDS:
        return f"n < {FEWEST_SEEDS}"
    if p is None:
        return NOTHING
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def verdict(gap: PairedGap | None, what: str = "loss") -> str:
    """What may be said of a gap, as a clause.

    Args:
        what: it is a gap of.
    """
    if gap is None:
        return "no seed in common with the baseline, so no gap"
    direction = "higher" if gap.mean > 0 else "lower"
    return _judged(gap, "differences", f"{what} significantly {direction}", "no significant difference")


def slope_verdict(slope: PairedGap) -> str:
    """What may be said of the change of a gap, as a clause."""
    direction = "rises" if slope.mean > 0 else "falls"
    return _judged(slope, "slopes", f"the gap {direction} significantly", "no significant change")


def _judged(gap: PairedGap, values: str, claimed: str, not_claimed: str) -> str:
    if gap.n < FEWEST_SEEDS:
        return f"n = {gap.n} < {FEWEST_SEEDS}: significance is not claimed"
    if gap.t_p_holm is None:
        return f"all {values} are equal, so there is nothing to test"
    p = p_value(gap.t_p_holm)
    p = f"p {p}" if p.startswith("<") else f"p = {p}"
    judged = claimed if gap.significance_claimed else not_claimed
    return f"{judged} at {share(LEVEL)} ({p} after Holm, n = {gap.n})"


def margin(gap: PairedGap) -> str:
    """`equivalent_within` as percent of perplexity, rounded up so that it still contains the interval."""
    within = gap.equivalent_within
    if within is None:
        return NOTHING
    return f"{math.ceil(round(1000 * within, 6)) / 10:.1f} %"


def gap_sentence(name: str, gap: PairedGap | None) -> str:
    """One line for the summary."""
    if gap is None:
        return f"{name}: {verdict(gap)}."
    size = f"{signed(gap.mean)} nats per token"
    if gap.low is not None:
        size += f" ({share(CONFIDENCE)} interval {signed(gap.low)} to {signed(gap.high)})"
    said = verdict(gap)
    if gap.equivalent_within is not None and gap.t_p_holm is not None and not gap.significance_claimed:
        # A missing star is not equality.
        said += f"; the data allow a difference up to {margin(gap)} of perplexity"
    return f"{name}: {size} against {gap.baseline}, perplexity {percent(gap.perplexity_ratio)}; {said}."
