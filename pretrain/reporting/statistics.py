"""Mean and standard deviation of a few values, as every report shows over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Mean of n values and their standard deviation (n - 1 in the denominator; None for a single value)."""

    n: int
    mean: float
    sd: float | None


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and standard deviation; None for no values."""
    if not values:
        return None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(n=len(values), mean=float(np.mean(values)), sd=sd)


def spread_of_all(values: Sequence[float | None]) -> Spread | None:
    """Return mean and standard deviation; None where a value is missing, as a mean of the others misleads."""
    known = [value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else None
