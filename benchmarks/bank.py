"""The cost of making the frozen bank.

    python -m benchmarks.bank

On one thread, in CPU seconds (so that other work on the machine disturbs little); each is the least
of a few repetitions:

* all shards of one rank for the `large` model, at tensor-parallel sizes 1, 2, 4 and 8, and the
  factors that
  stand in their place with construction `monarch`;
* heads of each construction, beside those of `qr`.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from threadpoolctl import threadpool_limits

from megatron_patches.bank.exact import FloatArray
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.orthonormal import (
    CONSTRUCTIONS,
    FACTORED,
    ROLES,
    BankRecipe,
    rows_of_heads,
)
from megatron_patches.bank.shards import layer_shard, rank_factors
from megatron_patches.bank.structured import is_power_of_two

NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 24, 1024, 16, 64  # the `large` model
LARGE = BankRecipe(
    seed=1234,
    hidden_size=HIDDEN_SIZE,
    head_dim=HEAD_DIM,
    num_attention_heads=NUM_HEADS,
    num_query_groups=NUM_HEADS,
)
HEAD_SHAPES = ((512, 64), (768, 64), (1024, 64), (4096, 128))
HEADS_TIMED = 4


def make_shards(tensor_parallel_size: int) -> None:
    """All frozen shards of rank 0 of the large model, in bf16."""
    for layer in range(NUM_LAYERS):
        for role in ROLES:
            layer_shard(
                LARGE,
                layer,
                role,
                rank=0,
                tensor_parallel_size=tensor_parallel_size,
                dtype=torch.bfloat16,
            )


def make_factors(tensor_parallel_size: int) -> None:
    """All factors of rank 0 of the large model with construction monarch, in bf16."""
    recipe = replace(LARGE, scope="layer", construction="monarch")
    heads = split_heads(
        NUM_HEADS,
        NUM_HEADS,
        frozen_groups=range(NUM_HEADS),
        rank=0,
        tensor_parallel_size=tensor_parallel_size,
    ).frozen
    for layer in range(NUM_LAYERS):
        rank_factors(recipe, layer, heads, torch.bfloat16)


def make_heads(hidden_size: int, head_dim: int, construction: str) -> FloatArray:
    """Make the rows of HEADS_TIMED query heads of layer 0.

    Args:
        hidden_size: width of the residual stream.
        head_dim: width of a head.
        construction: one of CONSTRUCTIONS.

    Returns:
        `[HEADS_TIMED * head_dim, hidden_size]`.
    """
    recipe = BankRecipe(
        seed=1234,
        hidden_size=hidden_size,
        head_dim=head_dim,
        num_attention_heads=HEADS_TIMED,
        num_query_groups=HEADS_TIMED,
        construction=construction,
    )
    return rows_of_heads(recipe, 0, "query", range(HEADS_TIMED))


def least_seconds(action: Callable[[], object], repetitions: int) -> float:
    """Time an action several times, after one run that is not counted.

    Args:
        action: what is timed.
        repetitions: how many runs count.

    Returns:
        The least CPU seconds of a run.
    """
    action()
    return min(timeit.repeat(action, timer=time.process_time, repeat=repetitions, number=1))


def main() -> None:
    """Print the table."""
    print(
        f"Large ({NUM_LAYERS} layers, hidden {HIDDEN_SIZE}, {NUM_HEADS} heads of {HEAD_DIM}), "
        "one rank"
    )
    for size in (1, 2, 4, 8):
        rows, factors = (
            least_seconds(partial(make, size), 2) for make in (make_shards, make_factors)
        )
        print(f"  tensor parallel {size}: {rows:.2f} s; monarch {factors:.3f} s")
    print("One head, ms (in brackets: times qr)")
    for shape in HEAD_SHAPES:
        row = {}
        for construction in CONSTRUCTIONS:
            too_large = construction == "cayley" and shape[0] > 1024  # cubic in hidden_size
            no_power = construction == "hadamard" and not is_power_of_two(shape[0])
            # Factored rows are made by the layer.
            if construction not in FACTORED and not too_large and not no_power:
                row[construction] = (
                    least_seconds(partial(make_heads, *shape, construction), 5) / HEADS_TIMED
                )
        cells = [
            f"{name} {1e3 * value:.2f} ({value / row['qr']:.1f})" for name, value in row.items()
        ]
        print(f"  {shape[0]} x {shape[1]}: {'  '.join(cells)}")


if __name__ == "__main__":
    with threadpool_limits(limits=1):
        main()
