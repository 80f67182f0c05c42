"""Coverage of the intervals of effective compute: how many simulated campaigns they hold in.

    python -m tools.simulations.compute_coverage

The baseline's loss falls by 0.46 nats a doubling of tokens, as the demo's; the variant has the
same curve at t / 1.15, and 0.95 of the cost of a token. Losses of five seeds vary by seed (0.03
nats, alike in both) and by run (0.015). The second column is of a curve that bends, 2.2 + 3.1
t^-0.2 with t in units of 307,200 tokens: `compare` draws straight lines between its points. Exit
code 1 if the first is not within 93 and 97 %.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from pretrain.compare.compute import Curve, price

TOKENS, RATIO, COST = (307_200, 614_400, 1_228_800), 1.15, 0.95
CAMPAIGNS, SEEDS, SEED_SD, RUN_SD = 3000, 5, 0.03, 0.015
CURVES: tuple[Callable[[float], float], ...] = (
    lambda tokens: 5.3 - 0.46 * math.log2(tokens / TOKENS[0]),
    lambda tokens: 2.2 + 3.1 * (tokens / TOKENS[0]) ** -0.2,
)


def coverage(curve: Callable[[float], float], tokens: int, lengths: Sequence[int]) -> float:
    """Return the share of intervals that hold the truth.

    Args:
        curve: The loss in nats by tokens.
        tokens: Of the runs that are compared.
        lengths: Of the variant's runs, in tokens.
    """
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(CAMPAIGNS):
        own, base = {}, {}
        for seed, shift in enumerate(random.normal(0, SEED_SD, SEEDS)):
            base[seed] = Curve.through(
                {t: curve(t) + shift + random.normal(0, RUN_SD) for t in TOKENS}
            )
            losses = {t: curve(t / RATIO) + shift + random.normal(0, RUN_SD) for t in lengths}
            own[seed] = Curve.through(losses, base[seed].slope if len(lengths) == 1 else None)
        spent = dict.fromkeys(own, (tokens, tokens))
        costs = dict.fromkeys(own, COST)
        equal = price(baseline="", curve="", own=own, base=base, tokens=spent, costs=costs)
        ratio = equal.effective_compute
        hits += ratio is not None and (ratio.low or 0) <= COST * RATIO <= (ratio.high or 0)
    return hits / CAMPAIGNS


def main() -> None:
    """Print the coverage for each form of a campaign."""
    held = []
    for tokens, lengths in (*((tokens, TOKENS) for tokens in TOKENS), (TOKENS[1], TOKENS[1:2])):
        straight, bent = (coverage(curve, tokens, lengths) for curve in CURVES)
        form = f"{tokens:>9,} tokens, variant of {len(lengths)} lengths"
        print(f"{form}: {straight:.1%}, bent {bent:.1%}")
        held.append(0.93 <= straight <= 0.97)
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
