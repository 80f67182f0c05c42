"""docs/results/modern at equal cost: what a variant saves buys tokens, at their price.

A doubling of the tokens is worth what it took off the loss of `vanilla_conv4` where the run ends:
from the length before it to its own, at the shortest from its own to the next.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from laboratory.results.tables import RESULTS, table

RUNS = RESULTS / "modern" / "runs.csv"
DENSE, MULTI_QUERY = "vanilla_conv4", "multi_query_conv4"


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
    "multi_query_conv4": Saved(0.121, 0.129, 0.099),
    "grouped_query_conv4": Saved(0.097, 0.103, None),
    "small_mlp_conv4": Saved(0.127, 0.106, None),
    "three_layers_conv4": Saved(0.121, 0.141, None),
    "monarch_shared_conv4": Saved(0.126, 0.092, 0.044),
    "trained_monarch_shared_conv4": Saved(0.125, 0.090, 0.030),
    "early_monarch_shared_conv4": Saved(0.126, 0.091, 0.040),
    "early_vanilla_conv4": Saved(0.032, 0.029, None),
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


def saved_share(variant: str, cost: str) -> float | None:
    """Return the share of a cost that a variant saves; None where it is not known.

    Args:
        variant: Name of a variant.
        cost: Key of COSTS.
    """
    if variant == DENSE or cost == "tokens":
        return 0.0
    share: float | None = getattr(SAVED[variant], COSTS[cost])
    return share


def at_equal_share(
    losses: Losses, variant: str, tokens: int, share: float | None
) -> dict[int, float]:
    """Return {seed: loss} as if a saved share had been spent on tokens; empty for None."""
    variant_losses = dict(losses[variant][tokens])
    if share is None:
        return {}
    if share == 0:
        return variant_losses
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
