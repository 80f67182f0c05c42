"""Coverage of the intervals of effective compute in `compare`: the share of simulated campaigns they hold in.

    python -m benchmarks.compute_coverage [--campaigns 3000] [--seeds 5]

The baseline's loss falls by 0.46 nats a doubling of tokens, as the demo's; the variant has the same curve at
t / 1.15, and 0.95 of the cost of a token. Losses vary by seed (0.03 nats, alike in both), by run (0.015). A
second column is of a curve that bends, 2.2 + 3.1 t^-0.2 with t in units of 307,200 tokens, between the points
of which `compare` draws straight lines. Exit code 1 where the first column is not within 93 and 97 %.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from pretrain.compare.compute import Curve, price

TOKENS, RATIO, COST = (307_200, 614_400, 1_228_800), 1.15, 0.95
SEED_SD, RUN_SD = 0.03, 0.015


def straight(tokens: float) -> float:
    """Return a loss that falls by the same at each doubling."""
    return 5.3 - 0.46 * math.log2(tokens / TOKENS[0])


def bent(tokens: float) -> float:
    """Return a loss that falls by less at each doubling."""
    return float(2.2 + 3.1 * (tokens / TOKENS[0]) ** -0.2)


def coverage(
    curve: Callable[[float], float], tokens: int, lengths: Sequence[int], seeds: int, campaigns: int
) -> float:
    """Return the share of intervals that hold the truth, for runs of `tokens`; the variant has `lengths`."""
    random, hits = np.random.default_rng(1), 0
    for _ in range(campaigns):
        own, base = {}, {}
        for seed, shift in enumerate(random.normal(0, SEED_SD, seeds)):
            base[seed] = Curve.through({t: curve(t) + shift + random.normal(0, RUN_SD) for t in TOKENS})
            losses = {t: curve(t / RATIO) + shift + random.normal(0, RUN_SD) for t in lengths}
            own[seed] = Curve.through(losses, base[seed].slope if len(lengths) == 1 else None)
        equal = price("", "", own, base, dict.fromkeys(own, (tokens, tokens)), dict.fromkeys(own, COST))
        ratio = equal.effective_compute
        hits += ratio is not None and (ratio.low or 0) <= COST * RATIO <= (ratio.high or 0)
    return hits / campaigns


def main() -> None:
    """Print the coverage for each form of a campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--campaigns", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    held = []
    for tokens, lengths in (*((tokens, TOKENS) for tokens in TOKENS), (TOKENS[1], TOKENS[1:2])):
        shares = [coverage(c, tokens, lengths, given.seeds, given.campaigns) for c in (straight, bent)]
        print(
            f"{tokens:>9,} tokens, variant of {len(lengths)} lengths: {shares[0]:.1%}, bent {shares[1]:.1%}"
        )
        held.append(0.93 <= shares[0] <= 0.97)
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
