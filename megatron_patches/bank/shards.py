"""Shards of the frozen bank for tensor-parallel ranks, and their digests.

A rank draws only the heads it owns (see `head_split`), which costs 1/N of the whole bank. The bits
of a head do not depend on N.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_patches.bank.exact import FloatArray, orthonormality_error
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.orthonormal import (
    ROLES,
    BankRecipe,
    Role,
    check_place,
    factors_of_heads,
    rows_of_heads,
)


def bank_rows(recipe: BankRecipe, layer: int, role: Role, heads: Sequence[int]) -> FloatArray:
    """Return W of heads of one role, drawn or from a file.

    Args:
        layer: number of the layer, from 0.
        heads: numbers of the heads, from 0.

    Returns:
        Float64 `[len(heads) * head_dim, hidden_size]`.

    Raises:
        MethodError: no such layer, role or head; a file that cannot be read, or has another digest.
    """
    if recipe.given_path is None:
        return rows_of_heads(recipe, layer, role, heads)
    check_place(recipe, layer, role, heads)
    weights_file = GivenWeights(Path(recipe.given_path))
    rows = [
        weights_file.head(layer, role, head, recipe.head_dim).double().numpy() for head in heads
    ]
    return np.concatenate(rows) if rows else np.empty((0, recipe.hidden_size))


def layer_shard(
    recipe: BankRecipe,
    layer: int,
    role: Role,
    rank: int,
    tensor_parallel_size: int,
    dtype: torch.dtype,
    frozen_groups: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the frozen rows of one role that a rank owns, in order.

    The float64 rows are cast on the CPU, to bf16 through fp32 as torch does.

    Args:
        layer: number of the layer, from 0.
        dtype: type that the float64 rows are cast to.
        frozen_groups: global numbers of the key heads whose group is frozen; None: all of them.

    Returns:
        `[local_heads * head_dim, hidden_size]`.

    Raises:
        MethodError: tensor_parallel_size does not divide num_query_groups; no such layer, role or
            rank.
    """
    groups = range(recipe.num_query_groups) if frozen_groups is None else frozen_groups
    split = split_heads(
        recipe.num_attention_heads,
        recipe.num_query_groups,
        frozen_groups=groups,
        rank=rank,
        tensor_parallel_size=tensor_parallel_size,
    )
    return head_rows_in(recipe, layer, role=role, heads=split.frozen[role], dtype=dtype)


def head_rows_in(
    recipe: BankRecipe, layer: int, role: Role, heads: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows of several heads of one role as in training.

    For a structured bank the factors are cast and then multiplied.

    Args:
        layer: number of the layer, from 0.
        heads: numbers of the heads, from 0.
        dtype: type that the float64 rows are cast to.

    Returns:
        CPU `[heads * head_dim, hidden_size]`.

    Raises:
        MethodError: no such layer, role or head; a file that cannot be read, or has another digest.
    """
    # Cast first, as a model holds the factors: products of cast factors have other last bits.
    if recipe.structured:
        return rank_factors(recipe, layer, {role: heads}, dtype).rows()
    return torch.from_numpy(bank_rows(recipe, layer, role, heads)).to(dtype)


def rank_factors(
    recipe: BankRecipe, layer: int, heads: Mapping[Role, Sequence[int]], dtype: torch.dtype
) -> Factors:
    """Return the CPU factors of some heads' rows, queries above keys, of a `structured` recipe.

    Args:
        layer: number of the layer, from 0.
        heads: {role: numbers of its heads}; a role that is missing has no rows.
        dtype: type that the float64 rows are cast to.
    """
    in_order = [(role, heads[role]) for role in ROLES if role in heads]
    factors = factors_of_heads(recipe, layer, in_order)
    return Factors(*(torch.from_numpy(factor).to(dtype).contiguous() for factor in factors))


def query_key_rows(
    recipe: BankRecipe, layer: int, heads: Mapping[Role, Sequence[int]], dtype: torch.dtype
) -> torch.Tensor | Factors:
    """Return the CPU rows of some heads, queries above keys, or their factors if `structured`.

    Args:
        layer: number of the layer, from 0.
        heads: {role: numbers of its heads}.
        dtype: type that the float64 rows are cast to.
    """
    if recipe.structured:
        return rank_factors(recipe, layer, heads, dtype)
    return torch.cat(
        [head_rows_in(recipe, layer, role=role, heads=heads[role], dtype=dtype) for role in ROLES]
    )


def digest(tensor: torch.Tensor) -> str:
    """Return the hexadecimal SHA-256 of a tensor's elements.

    They are hashed in row-major order, as the bytes of their dtype.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)  # as bytes: numpy has no bfloat16
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def head_digests(shard: torch.Tensor, head_dim: int) -> list[str]:
    """Return the `digest` of each head of a shard `[heads * head_dim, hidden_size]`, in order."""
    return [digest(head) for head in shard.split(head_dim)]


def role_digest(digests: Iterable[str]) -> str:
    """Return the SHA-256 of a layer's role: of its heads' digests, joined in global order.

    The result does not depend on how the heads were spread over ranks.
    """
    return hashlib.sha256("".join(digests).encode("ascii")).hexdigest()


def orthonormality_errors(shard: torch.Tensor, head_dim: int) -> list[float]:
    """Return each head's largest |W Wᵀ − I| of a shard `[heads * head_dim, hidden_size]`.

    The numbers are the same on every machine.
    """
    return [
        orthonormality_error(head.double().cpu().numpy()) for head in shard.detach().split(head_dim)
    ]
