"""docs/results/modern at equal cost: what a variant saves buys tokens, at their price.

    python -m laboratory.results.equal_cost [RUNS.CSV...]

Without files, those of docs/results/modern. A doubling of the tokens is worth what it took off the
loss of `vanilla_conv4` where the run ends: from the length before it to its own, at the shortest
from its own to the next. Prints the gaps to each rival at every length.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from laboratory.api import paired_gaps
from laboratory.results.tables import RESULTS, table

RUNS = RESULTS / "modern" / "runs.csv"
DENSE, MULTI_QUERY = "vanilla_conv4", "multi_query_conv4"
RIVALS = (DENSE, MULTI_QUERY, "grouped_query_conv4", "small_mlp_conv4", "three_layers_conv4")
"""Variants that freeze nothing and have dense queries and keys."""


@dataclass(frozen=True)
class Saved:
    """Shares of the costs of `vanilla_conv4` that a variant saves.

    Attributes:
        flops: Saved share of the FLOPs of a run of `large_modern`, by `plan`.
        hours: Saved share of its GPU-hours, by `plan`'s estimate.
        seconds: Saved share of a step's seconds, measured on a core; None: not measured.
    """

    flops: float
    hours: float
    seconds: float | None


SAVED = {
    "multi_query_conv4": Saved(0.122, 0.134, 0.099),
    "grouped_query_conv4": Saved(0.097, 0.107, None),
    "small_mlp_conv4": Saved(0.127, 0.099, None),
    "three_layers_conv4": Saved(0.121, 0.146, None),
    "monarch_shared_conv4": Saved(0.126, 0.076, 0.044),
    "trained_monarch_shared_conv4": Saved(0.125, 0.075, 0.030),
    "early_monarch_shared_conv4": Saved(0.126, 0.076, 0.040),
    "early_vanilla_conv4": Saved(0.033, 0.028, None),
}
COSTS = {
    "tokens": "",
    "FLOPs of large_modern": "flops",
    "GPU-hours by plan": "hours",
    "seconds of these runs": "seconds",
}
"""Costs that can be equal, with the attribute of Saved for each."""

Losses = Mapping[str, Mapping[int, Mapping[int, float]]]
"""[variant][tokens][seed]"""


def read_losses(files: Iterable[Path]) -> Losses:
    """Return the validation losses of runs, by the first part of their names.

    Args:
        files: runs.csv of reports.
    """
    losses: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for path in files:
        for run in table(path):
            variant = run["name"].partition("-")[0]
            losses_by_seed = losses[variant][int(run["tokens"])]
            losses_by_seed[int(run["seed"])] = float(run["validation_loss"])
    return losses


def at_equal_cost(losses: Losses, variant: str, tokens: int, cost: str) -> dict[int, float]:
    """Return {seed: loss} as if the variant had spent its saving on tokens.

    Args:
        losses: Losses of all variants.
        variant: One of them.
        tokens: Length of the runs.
        cost: Key of COSTS.

    Returns:
        Empty where the saving is not known.
    """
    variant_losses = dict(losses[variant][tokens])
    if variant == DENSE or cost == "tokens":
        return variant_losses
    share = getattr(SAVED[variant], COSTS[cost])
    if share is None:
        return {}
    # A share s saved buys 1 / (1 - s) times the tokens.
    doublings = -math.log2(1 - share)
    lengths = sorted(losses[DENSE])
    last = max(1, lengths.index(tokens))
    shorter, longer = lengths[last - 1], lengths[last]
    doublings /= math.log2(longer / shorter)
    gain = {
        seed: losses[DENSE][shorter][seed] - losses[DENSE][longer][seed] for seed in variant_losses
    }
    return {seed: loss - doublings * gain[seed] for seed, loss in variant_losses.items()}


def main(files: list[Path]) -> None:
    """Print every gap at every length and equal cost.

    Args:
        files: runs.csv of reports.
    """
    losses = read_losses(files)
    for tokens in sorted(losses[DENSE]):
        trained = [name for name in (DENSE, *SAVED) if tokens in losses[name]]
        for cost in COSTS:
            spent = {name: at_equal_cost(losses, name, tokens, cost) for name in trained}
            comparable = {name: by_seed for name, by_seed in spent.items() if by_seed}
            for baseline in (name for name in RIVALS if name in comparable):
                for name, gap in paired_gaps(comparable, baseline).items():
                    ends = f"{gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
                    print(f"{tokens:9,} equal {cost:21} {name:28} - {baseline:19} {ends}")


if __name__ == "__main__":
    main([Path(file) for file in sys.argv[1:]] or [RUNS])
