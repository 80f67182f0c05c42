"""Recipes of banks in as few words as tests have use for, and the rows of a rank."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from megatron_patches.bank.exact import FloatArray
from megatron_patches.bank.orthonormal import BankRecipe, Role, rows_of_heads
from megatron_patches.bank.shards import layer_shard


def recipe_of(
    hidden_size: int,
    head_dim: int,
    heads: int = 1,
    groups: int | None = None,
    seed: int = 1234,
    **axes: Any,
) -> BankRecipe:
    """As many key heads as query heads, unless `groups` says otherwise."""
    return BankRecipe(
        seed,
        hidden_size,
        head_dim=head_dim,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        **axes,
    )


def head_rows(recipe: BankRecipe, layer: int, role: Role, head: int) -> FloatArray:
    """Rows of one head, drawn alone: `[head_dim, hidden]`."""
    return rows_of_heads(recipe, layer, role, [head])


def shard(
    recipe: BankRecipe, layer: int, role: Role, dtype: torch.dtype, rank: int = 0, size: int = 1
) -> torch.Tensor:
    """Rows of a rank among `size`, by default of the only one: `[heads * head_dim, hidden]`."""
    return layer_shard(recipe, layer, role=role, rank=rank, tensor_parallel_size=size, dtype=dtype)


def sha256(values: FloatArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
