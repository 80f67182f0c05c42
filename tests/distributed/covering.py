"""Choosing some of a cross product so that every two values that occur together in it still do.

Most mistakes that a full cross product would find need two things to meet (a stage and a kind of
weight, say), not three. So CI runs a covering selection, and `make test-all` everything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=Hashable)
Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(factors: Mapping[str, object]) -> set[Pair]:
    """Every two (factor, value) of a case."""
    return set(combinations(sorted(factors.items(), key=lambda factor: factor[0]), 2))


def covering(
    cases: Sequence[Case],
    factors: Callable[[Case], Mapping[str, object]],
    covered: Sequence[Case] = (),
    at_least: Mapping[Callable[[Case], Hashable], int] | None = None,
) -> list[Case]:
    """A selection of `cases`, in order, in which every pair of factor values of all of them occurs.

    Greedy and deterministic: always the first of the cases that add most.

    Args:
        factors: the values of a case, by the factor's name.
        covered: cases that are run anyway: their pairs need no other.
        at_least: {property of a case: in how many chosen cases each of its values shall be}.
    """
    missing = {pair for case in cases for pair in pairs(factors(case))}
    missing -= {pair for case in covered for pair in pairs(factors(case))}
    wanted = [
        {value_of(case): count for case in cases} for value_of, count in (at_least or {}).items()
    ]
    properties = list(zip(at_least or (), wanted, strict=True))

    def gain(case: Case) -> int:
        short = sum(counts[value_of(case)] > 0 for value_of, counts in properties)
        return len(pairs(factors(case)) & missing) + short

    left = list(cases)
    chosen = set()
    while left and gain(best := max(left, key=gain)):  # max takes the first of equals
        missing -= pairs(factors(best))
        for value_of, counts in properties:
            counts[value_of(best)] -= 1
        left.remove(best)
        chosen.add(best)
    return [case for case in cases if case in chosen]
