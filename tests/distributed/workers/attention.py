"""Rank functions of test_attention.py.

Run one attention layer in float64 beside plain autograd, and count what it does.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.bank.shards import digest, layer_shard
from pretrain.ranks.groups import ParallelContext
from tests.distributed.one_layer import (
    full_weights,
    initial_rows,
    plain_layer,
    run_layer,
    worst_difference,
)
from tests.distributed.workers.runs import parallel
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, SEED, SEQ, bank_of, build


def attention_cases(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a report for each case.

    Errors against the reference, collectives, shapes of the matrix products.
    """
    with parallel() as context:
        return [_attention_case(context, **case) for case in payload["cases"]]


def _attention_case(
    context: ParallelContext, variant: str, groups: int, sequence_parallel: bool
) -> dict[str, Any]:
    model = build(
        variant,
        groups,
        torch.float64,
        layers=1,
        tensor_parallel_size=context.world_size,
        sequence_parallel=sequence_parallel,
    )
    attention = model.decoder.layers[0].self_attention
    layer = run_layer(model, context, SEQ, sequence_parallel)
    reference = _reference(layer.full, layer.full_grad, bank_of(variant, groups), groups)
    heads = slice(
        *(torch.tensor([context.rank, context.rank + 1]) * groups * HEAD_DIM // context.world_size)
    )
    value_grad = (
        attention.linear_qkv.value_weight.grad
        if hasattr(attention.linear_qkv, "value_weight")
        else _value_rows(attention.linear_qkv.weight.grad, groups // context.world_size)
    )
    errors = layer.errors(reference)
    errors["value"] = worst_difference(value_grad, reference["value"][heads])
    return {"errors": errors, **layer.report}


def _reference(
    x: torch.Tensor, output_grad: torch.Tensor, recipe: BankRecipe | None, groups: int
) -> dict[str, torch.Tensor]:
    """The whole layer in plain torch operations on full weights, differentiated by autograd."""

    def rows(role: str, heads: int) -> torch.Tensor:
        if recipe is None:
            return initial_rows(SEED, role, heads * HEAD_DIM)
        return layer_shard(
            recipe, 0, role=role, rank=0, tensor_parallel_size=1, dtype=torch.float64
        )

    def probabilities(x: torch.Tensor) -> torch.Tensor:
        query = (x @ rows("query", HEADS).t()).unflatten(-1, (HEADS, HEAD_DIM))
        key = (x @ rows("key", groups).t()).unflatten(-1, (groups, HEAD_DIM))
        key = key.repeat_interleave(HEADS // groups, dim=2)
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(HEAD_DIM)
        future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(dim=-1)

    return plain_layer(x, output_grad, groups, SEED, probabilities=probabilities)


def weight_digests(payload: dict[str, Any]) -> dict[str, dict[str, str]]:
    """{variant: {weight name: SHA-256 of the full float32 weight}}; fused Q, K and V apart."""
    answer = {}
    groups = payload["groups"]
    with parallel() as context:
        for variant in payload["variants"]:
            model = build(variant, groups, layers=1, tensor_parallel_size=context.world_size)
            weights = full_weights(model, context, groups)
            answer[variant] = {name: digest(weight) for name, weight in weights}
    return answer


def _value_rows(fused: torch.Tensor, groups: int) -> torch.Tensor:
    return fused.view(groups, -1, HEAD_DIM, HIDDEN)[:, -1].reshape(-1, HIDDEN)
