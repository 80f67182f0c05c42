"""Order of a blend's members: the member of sample n is a function of the weights and n.

The rule is earliest-deadline-first over proportionate-fair windows (Baruah, Cohen, Plaxton and
Varvel, "Proportionate progress", Algorithmica 15, 1996), as docs/samples.md describes it. Rational
shares with denominator D repeat after D samples: the order is one table of D entries, and position
n needs no walk through those before it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards.permutation import Int64Array

MAX_PERIOD = 1 << 20


def exact_shares(weights: Sequence[float | Fraction]) -> list[Fraction]:
    """Convert weights to shares that sum to 1; a float counts as it is written.

    Raises:
        DataError: If a weight is not above 0.
    """
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(f"weight {weight} must be a number above 0")
    exact = [_as_written(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def _as_written(weight: float | Fraction) -> Fraction:
    if isinstance(weight, Fraction):
        return weight
    decimal = Fraction(str(weight))
    short = decimal.limit_denominator(MAX_PERIOD)  # 0.3333333333333333 is a third
    return short if abs(short - decimal) <= decimal / 10**15 else decimal


class Proportions:
    """Endless order of a blend's members."""

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        """Make the table of members for these weights, in any unit."""
        self.quotas = _quotas(exact_shares(weights))
        """Number of samples that each member gives in every sum(quotas) samples."""
        self._members = _earliest_deadline_first(self.quotas)
        self._ranks = np.empty_like(self._members)
        for member, quota in enumerate(self.quotas):
            self._ranks[self._members == member] = np.arange(quota)

    def locate(self, sample_numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Locate samples: [n] numbers -> ([n] members, [n] numbers within the members)."""
        period, offset = np.divmod(sample_numbers, len(self._members))
        members = self._members[offset]
        quotas = np.asarray(self.quotas, dtype=np.int64)
        return members, period * quotas[members] + self._ranks[offset]

    def before(self, sample_number: int) -> list[int]:
        """Count the samples 0 … sample_number - 1 that each member gave."""
        period, offset = divmod(sample_number, len(self._members))
        counts = np.bincount(self._members[:offset], minlength=len(self.quotas)).tolist()
        return [period * quota + count for quota, count in zip(self.quotas, counts, strict=True)]


def _quotas(shares: Sequence[Fraction]) -> list[int]:
    """Convert shares to whole numbers of samples in a period.

    Shares that need a longer period than MAX_PERIOD are rounded to MAX_PERIOD-ths, each to at least
    one.
    """
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    quotas = [max(1, math.floor(share * MAX_PERIOD)) for share in shares]
    remainders = [share * MAX_PERIOD - quota for share, quota in zip(shares, quotas, strict=True)]
    missing = max(0, MAX_PERIOD - sum(quotas))
    # The largest remainders get what is missing; the lower member wins a tie.
    for member in sorted(range(len(shares)), key=lambda m: (-remainders[m], m))[:missing]:
        quotas[member] += 1
    return quotas


def _earliest_deadline_first(quotas: Sequence[int]) -> Int64Array:
    """Return the member [sum(quotas)] of each sample of one period."""
    period = sum(quotas)
    count = np.concatenate([np.arange(quota, dtype=np.int64) for quota in quotas])
    member = np.repeat(np.arange(len(quotas)), quotas)
    quota = np.asarray(quotas, dtype=np.int64)[member]
    release = count * period // quota
    deadline = -(-(count + 1) * period // quota)
    by_release = np.lexsort((member, deadline, release))
    # One integer orders by deadline, then by member, and its remainder is the member.
    keys = (deadline * len(quotas) + member)[by_release].tolist()
    released = np.searchsorted(release[by_release], np.arange(period), side="right").tolist()
    order = np.empty(period, dtype=np.int64)
    waiting: list[int] = []
    next_key = 0
    for position in range(period):
        while next_key < released[position]:
            heapq.heappush(waiting, keys[next_key])
            next_key += 1
        order[position] = heapq.heappop(waiting) % len(quotas)
    return order
