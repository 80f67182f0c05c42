"""What is said of quartiles, p values and gaps, the same in the report and on the console."""

from __future__ import annotations

from pretrain.compare.cost import Quartiles
from pretrain.reporting.text import NOTHING, number
from pretrain.study.gaps import PairedGap
from pretrain.study.tables import judged

NOT_FINITE = "not finite"
"""In place of the mean of a loss that no run has."""


def quartile_text(value: Quartiles | None, digits: int) -> str:
    """median [first quartile, third quartile]"""
    if value is None:
        return NOTHING
    low, high = number(value.low, digits), number(value.high, digits)
    return f"{number(value.median, digits)} [{low}, {high}]"


def slope_verdict(slope: PairedGap) -> str:
    """Return what may be said of the change of a gap, as a clause."""
    direction = "rises" if slope.mean > 0 else "falls"
    return judged(slope, "slopes", f"the gap {direction} significantly", "no significant change")
