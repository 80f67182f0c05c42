"""The cost of making the frozen bank, on one thread, in CPU seconds.

    python -m benchmarks.bank [--rounds 3] [--json FILE]

All shards of one rank for the `large` model at tensor-parallel sizes 1 and 8, and the factors that
stand in their place with construction `monarch`; then four heads of each construction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from threadpoolctl import threadpool_limits

from benchmarks.rounds import options_parser, report, take_turns
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.orthonormal import (
    CONSTRUCTIONS,
    FACTORED,
    ROLES,
    BankRecipe,
    rows_of_heads,
)
from megatron_patches.bank.shards import layer_shard, rank_factors

NUM_LAYERS, NUM_HEADS = 24, 16  # of `large`
LARGE = BankRecipe(
    seed=1234,
    hidden_size=1024,
    head_dim=64,
    num_attention_heads=NUM_HEADS,
    num_query_groups=NUM_HEADS,
)
FOUR_HEADS = replace(LARGE, num_attention_heads=4, num_query_groups=4)


def make_shards(size: int) -> None:
    """Make all frozen shards of rank 0 of `size` tensor-parallel ranks, in bf16."""
    for layer in range(NUM_LAYERS):
        for role in ROLES:
            layer_shard(LARGE, layer, role, rank=0, tensor_parallel_size=size, dtype=torch.bfloat16)


def make_factors(size: int) -> None:
    """Make all factors of rank 0 with construction monarch, in bf16."""
    recipe = replace(LARGE, scope="layer", construction="monarch")
    groups = range(NUM_HEADS)
    heads = split_heads(
        NUM_HEADS, NUM_HEADS, frozen_groups=groups, rank=0, tensor_parallel_size=size
    )
    for layer in range(NUM_LAYERS):
        rank_factors(recipe, layer, heads.frozen, torch.bfloat16)


def main() -> None:
    """Print both tables."""
    options = options_parser(__doc__, rounds=3).parse_args()
    actions: dict[str, Callable[[], object]] = {}
    for size in (1, 8):
        actions[f"large, tensor parallel {size}: qr"] = partial(make_shards, size)
        actions[f"large, tensor parallel {size}: monarch"] = partial(make_factors, size)
    rows = sorted(set(CONSTRUCTIONS) - set(FACTORED) - {"qr"})  # a layer makes factored rows
    for name in ("qr", *rows):
        recipe = replace(FOUR_HEADS, construction=name)
        actions[f"four heads: {name}"] = partial(
            rows_of_heads, recipe, 0, role="query", heads=range(4)
        )
    with threadpool_limits(limits=1):
        report(take_turns(actions, options.rounds, time.process_time), options.json)


if __name__ == "__main__":
    main()
