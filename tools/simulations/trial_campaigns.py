"""Simulated campaigns of `pretrain trial`: false answers at any stopping time, pairs at d_z = 1.

    python -m tools.simulations.trial_campaigns [--campaigns 10000]

Differences are normal with standard deviation 1 (their scale does not matter), and in one row
skewed. A campaign goes to LAST pairs if nothing answers before, so a row's last column bounds every
stopping time.
"""

from __future__ import annotations

import argparse
import math
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy import special

from pretrain.reporting.text import share
from pretrain.study.sequential import EXPONENT, FIRST, KAPPA, LAST, NO, YES, fixed_power, quantile

Floats = NDArray[np.float64]
N = np.arange(1, LAST + 1)
LOOKS = (5, 10, 20, 50, LAST)
CASES = (
    ("better", 0.0, "yes"),
    ("better", -1.0, "no"),
    ("within", 1.0, "yes"),
    ("within", 0.5, "yes"),
    ("within", 1.0, "no"),
    ("within", 0.2, "no"),
)
"""(question, true gap in standard deviations, false answer).

The margin is of the gap's size, and 1 where it is 0.
"""


def running(differences: Floats) -> tuple[Floats, Floats]:
    """Return the mean and its standard error after every pair from FIRST on, [campaigns, looks]."""
    n = N[FIRST - 1 :]
    sums = differences.cumsum(1)[:, FIRST - 1 :]
    squares = (differences * differences).cumsum(1)[:, FIRST - 1 :]
    return sums / n, np.sqrt(np.maximum(squares - sums * sums / n, 0) / (n - 1) / n)


def first(claimed: NDArray[np.bool_]) -> Floats:
    """Return the number of pairs at the first claim of each campaign; infinite without one."""
    return np.where(claimed.any(1), claimed.argmax(1) + FIRST, np.inf)


def answers(differences: Floats, question: str, margin: float) -> tuple[Floats, Floats]:
    """Answer a question in each campaign.

    Args:
        differences: Of pairs, `[campaigns, LAST]`.
        question: "better" or "within".
        margin: Of the question.

    Returns:
        The pairs at "yes" and at "no", infinite where that is not the first answer, `[campaigns]`.
    """
    mean, error = running(differences)
    yes, no = (
        np.array([quantile(int(n), level) for n in N[FIRST - 1 :]]) * error for level in (YES, NO)
    )
    if question == "better":
        shown = mean + yes < 0
        refuted = mean - no > -margin
    else:
        shown = (mean - yes > -margin) & (mean + yes < margin)
        refuted = (mean - no > margin) | (mean + no < -margin)
    at_yes = first(shown)
    at_no = first(refuted)
    return np.where(at_yes <= at_no, at_yes, np.inf), np.where(at_no < at_yes, at_no, np.inf)


def kappa(level: float, random: np.random.Generator, campaigns: int) -> float:
    """Return κ for one level from simulated sequences of p values under the bound itself.

    Args:
        level: Of the bound.
        random: Where chance comes from.
        campaigns: How many to simulate.
    """
    mean, error = running(random.standard_normal((campaigns, LAST)))
    n = N[FIRST - 1 :]
    return float(np.quantile((special.stdtr(n - 1, -mean / error) * n**EXPONENT).min(1), level))


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description="Simulated campaigns of `pretrain trial`.")
    parser.add_argument("--campaigns", type=int, default=10_000)
    campaigns = parser.parse_args().campaigns
    random = np.random.default_rng(25)
    for level, used in KAPPA.items():
        again = kappa(level, random, 20 * campaigns)
        print(f"κ({level}) used {used}, from {20 * campaigns:,} simulated sequences {again:.4f}")
    error = 100 * math.sqrt(YES * (1 - YES) / campaigns)
    print(f"\nfalse answers among {campaigns:,} campaigns, % by {LOOKS} pairs (5 % ± {error:.2f})")
    normal = random.standard_normal((campaigns, LAST))
    skewed = (random.exponential(size=(campaigns, LAST)) - 1) * random.choice(
        [-1, 1], size=(campaigns, 1)
    )
    for (name, noise), (question, true, wrong) in product(
        (("normal", normal), ("skewed", skewed)), CASES
    ):
        margin = abs(true) or 1.0
        at = answers(noise + true, question, margin)[wrong == "no"]
        shares = ", ".join(f"{100 * float((at <= look).mean()):.2f}" for look in LOOKS)
        print(f"  {name}: {question} by {margin} sd, truth {true:+}, '{wrong}': {shares}")
    at_yes, at_no = answers(normal - 1, "better", 1.0)
    pairs = np.minimum(np.minimum(at_yes, at_no), LAST)
    power = float(np.isfinite(at_yes).mean())
    null = np.minimum(np.minimum(*answers(normal, "better", 1.0)), LAST)
    answered = f"mean {pairs.mean():.2f} pairs, median {np.median(pairs):.0f}"
    print(f"\nd_z = 1: {answered}, 'yes' in {power:.3f}")
    print(f"no difference: mean {null.mean():.2f} pairs, median {np.median(null):.0f}")
    print("of one fixed t-test:")
    for level, wanted in product((YES, NO), (0.8, 0.9, 0.95, 1 - NO, power)):
        fixed = next(n for n in range(3, 200) if fixed_power(n, level, 1.0) >= wanted)
        ratio = share(pairs.mean() / fixed)
        print(f"  one-sided {100 * level:g} %, power {100 * wanted:.1f} %, {fixed} pairs: {ratio}")


if __name__ == "__main__":
    main()
