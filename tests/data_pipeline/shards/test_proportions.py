"""The order of a blend's members: exact proportions at every moment, random access."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.proportions import MAX_PERIOD, Proportions, exact_shares

SLIMPAJAMA = [0.522, 0.267, 0.052, 0.046, 0.042, 0.033, 0.038]
WEIGHTS = [
    [1.0],
    [0.7, 0.3],
    [1, 1, 1],
    [1 / 3, 1 / 2, 1 / 6],
    [5, 1, 1, 1, 1, 1, 1, 1],
    [0.9, 0.02, 0.02, 0.02, 0.02, 0.02],
    [1e-4, 1],
    SLIMPAJAMA,
    [13, 11, 7, 5, 3, 2, 17, 19, 23, 29],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_never_a_sample_away_from_the_exact_proportion(weights: list[float]) -> None:
    proportions = Proportions(weights)
    period = sum(proportions.quotas)
    count = max(20_000, 2 * period)
    members, numbers = proportions.locate(np.arange(count))
    position = np.arange(1, count + 1)
    for member, share in enumerate(exact_shares(weights)):
        counts = np.cumsum(members == member)
        # |counts - share * position| < 1, in whole numbers so that nothing is rounded.
        distance = np.abs(counts * share.denominator - position * share.numerator)
        assert distance.max() < share.denominator
        assert np.array_equal(numbers[members == member], np.arange(counts[-1]))
        counts_before = [proportions.before(n)[member] for n in (0, 1, 17, count)]
        assert counts_before == [0, counts[0], counts[16], counts[-1]]


def test_a_number_far_out_needs_no_walk() -> None:
    proportions = Proportions(SLIMPAJAMA)
    far = 10**15
    offset = far % sum(proportions.quotas)
    members, numbers = proportions.locate(np.arange(far, far + 1000))
    near, first = proportions.locate(np.arange(offset, offset + 1000))
    assert np.array_equal(members, near)
    for member, share in enumerate(exact_shares(SLIMPAJAMA)):
        assert set((numbers - first)[members == member].tolist()) == {share * far}


def test_the_pattern_is_pinned() -> None:
    # A change here changes the data order of every blended run that is resumed.
    members, _ = Proportions([5, 3, 2]).locate(np.arange(10))
    assert "".join(map(str, members.tolist())) == "0102010102"


def test_weights_are_taken_as_written_and_in_any_unit() -> None:
    assert exact_shares([0.1, 0.2]) == [Fraction(1, 3), Fraction(2, 3)] == exact_shares([1, 2])
    assert exact_shares([1 / 3, 2 / 3]) == [Fraction(1, 3), Fraction(2, 3)]
    assert Proportions([0.1, 0.2]).quotas == [1, 2]


def test_shares_that_need_a_very_long_period_are_rounded_to_it() -> None:
    weights = [878_123_456_789, 267_123_456_701, 52_000_000_007, 1]
    quotas = Proportions(weights).quotas
    assert sum(quotas) == MAX_PERIOD and quotas[-1] == 1
    for quota, share in zip(quotas[:-1], exact_shares(weights), strict=False):
        assert abs(quota / MAX_PERIOD - share) <= 1.5 / MAX_PERIOD


@pytest.mark.parametrize("bad", [0, -1.5, float("nan"), float("inf")])
def test_weights_must_be_above_zero(bad: float) -> None:
    with pytest.raises(DataError, match="must be a number above 0"):
        Proportions([1, bad])
