"""Coverage of the intervals of `ladder`: in how many simulated campaigns they hold the truth.

    python -m tools.simulations.ladder_coverage [--campaigns 150]

Three arms, three sizes, three lengths and three seeds; the next size is predicted at the same
lengths. Losses vary by seed, alike in all runs (0.02 nats), and by run (0.01). Further rows: no
effect of the seeds; seeds ahead that were not fitted; five seeds; a law that misses every size and
length by a normal error of 0.005 or 0.01 nats, alike in all arms. Exit code 1 if a prediction's
90 % interval holds in less than 85 %.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from pretrain.compare import ladder
from pretrain.compare.ladder import Cell, fit_ladder

FACTORS = {"base": 1.0, "other": 0.8, "third": 1.3}
SIZES, NEXT = (462_720, 841_536, 1_318_656), 2_567_808
LENGTHS = (256_000, 512_000, 1_024_000)
FORMS: dict[str, dict[str, float]] = {
    "three seeds": {},
    "without an effect of the seeds": {"seed_sd": 0.0},
    "other seeds ahead": {"other_seeds": 3},
    "five seeds": {"seeds": 5},
    "the law misses by 0.005": {"misfit_sd": 0.005},
    "the law misses by 0.01": {"misfit_sd": 0.01},
}


def law(arm: str, parameters: int, tokens: int) -> float:
    """Return the true loss in nats.

    Args:
        arm: One of `FACTORS`.
        parameters: Of the model.
        tokens: That it was trained on.
    """
    return 2.0 + 0.9 * (parameters / 8e5) ** -0.35 + 1.6 * (FACTORS[arm] * tokens / 5e5) ** -0.45


def campaign(
    random: np.random.Generator,
    seed_sd: float = 0.0,
    run_sd: float = 0.01,
    misfit_sd: float = 0.0,
    seeds: float = 3,
    other_seeds: float = 0,
) -> tuple[list[Cell], list[Cell]]:
    """Draw a campaign.

    Args:
        random: Where chance comes from.
        seed_sd: Standard deviation by seed, nats.
        run_sd: The same by run.
        misfit_sd: The same by size and length.
        seeds: How many each cell has.
        other_seeds: The first seed of the next size.

    Returns:
        The cells that are fitted, and those of the next size with the losses they will have.
    """
    alike = random.normal(0, seed_sd, int(seeds + other_seeds))
    misfit = {(n, d): random.normal(0, misfit_sd) for n in (*SIZES, NEXT) for d in LENGTHS}

    def cells(sizes: tuple[int, ...], first: float) -> list[Cell]:
        found = []
        for arm, n, d in ((arm, n, d) for arm in FACTORS for n in sizes for d in LENGTHS):
            mean = law(arm, n, d) + misfit[n, d]
            own = range(int(first), int(first + seeds))
            found.append(
                Cell(arm, n, d, {s: mean + alike[s] + random.normal(0, run_sd) for s in own})
            )
        return found

    return cells(SIZES, 0), cells((NEXT,), other_seeds)


def main() -> None:
    """Print the shares for each form of a campaign."""
    parser = argparse.ArgumentParser(description="Coverage of the intervals of `ladder`.")
    parser.add_argument("--campaigns", type=int, default=150)
    ladder.FITS = 200
    campaigns = parser.parse_args().campaigns
    least = 1.0
    for name, form in FORMS.items():
        random = np.random.default_rng(1)
        inside = []
        widths = []
        factors = []
        for _ in range(campaigns):
            cells, ahead = campaign(random, **{"seed_sd": 0.02, **form})
            found = fit_ladder(cells, "base", ahead)
            for row, cell in zip(found.predictions, ahead, strict=True):
                inside.append(row.low <= cell.loss <= row.high)
                widths.append(row.high - row.low)
            factors += [
                low <= FACTORS[arm] <= high
                for arm, (_, low, high) in list(found.factors.items())[1:]
            ]
        least = min(least, float(np.mean(inside)))
        shares = f"{np.mean(inside):.1%} of predictions, {np.mean(factors):.1%} of factors"
        print(f"{name:32} {shares}; width {np.median(widths):.3f} nats", flush=True)
    sys.exit(least < 0.85)


if __name__ == "__main__":
    main()
