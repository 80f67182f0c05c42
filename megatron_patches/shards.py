"""Which heads a tensor-parallel rank owns, its shard of the frozen bank, and digests to know a bank by.

Rank r of N owns heads [r · heads / N, (r + 1) · heads / N) of each role, as megatron-core does. A shard is
made of its own heads only, so making it costs 1/N of the whole bank, and the heads' bits do not depend on N.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from megatron_patches.errors import MethodError
from megatron_patches.exact import orthonormality_error
from megatron_patches.orthonormal import BankRecipe, Role, rows_of_heads


def heads_of_rank(
    num_heads: int, rank: int, tensor_parallel_size: int, name: str = "num_attention_heads"
) -> range:
    """The global numbers of the heads that one tensor-parallel rank owns.

    Args:
        num_heads: heads of one role in a layer.
        name: what the caller's configuration calls `num_heads`, for the error.

    Raises:
        MethodError: the size does not divide num_heads, or there is no such rank.
    """
    if tensor_parallel_size < 1 or num_heads % tensor_parallel_size:
        raise MethodError(
            f"{name}={num_heads} is not divisible by tensor_model_parallel_size={tensor_parallel_size}; "
            "choose a tensor-parallel size that divides it"
        )
    if not 0 <= rank < tensor_parallel_size:
        raise MethodError(
            f"tensor-parallel rank {rank} does not exist: tensor_model_parallel_size={tensor_parallel_size}"
        )
    count = num_heads // tensor_parallel_size
    return range(rank * count, (rank + 1) * count)


def layer_shard(
    recipe: BankRecipe, layer: int, role: Role, rank: int, tensor_parallel_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """One rank's frozen rows of one role in one layer: CPU tensor [local_heads * head_dim, hidden_size].

    Heads are in global order; the float64 rows are cast to `dtype` once.

    Args:
        layer: global layer number, from 0.

    Raises:
        MethodError: tensor_parallel_size does not divide num_query_groups; no such layer, role or rank.
    """
    grouped = recipe.num_query_groups != recipe.num_attention_heads
    name = "num_query_groups" if grouped else "num_attention_heads"
    heads = heads_of_rank(recipe.num_query_groups, rank, tensor_parallel_size, name)
    if role == "query":
        heads = heads_of_rank(recipe.num_attention_heads, rank, tensor_parallel_size)
    return torch.from_numpy(rows_of_heads(recipe, layer, role, heads)).to(dtype)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hexadecimal) of the tensor's elements in row-major order, as bytes of its dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)  # as bytes: numpy has no bfloat16
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def head_digests(shard: torch.Tensor, head_dim: int) -> list[str]:
    """`digest` of each head of a shard [heads * head_dim, hidden_size], in order."""
    return [digest(head) for head in shard.split(head_dim)]


def role_digest(digests: Iterable[str]) -> str:
    """One SHA-256 for a (layer, role), from the `head_digests` of all its heads in global order.

    Built from the heads' digests, so it is the same however the heads were spread over ranks.
    """
    return hashlib.sha256("".join(digests).encode("ascii")).hexdigest()


def orthonormality_errors(shard: torch.Tensor, head_dim: int) -> list[float]:
    """The largest |W Wᵀ − I| of each head of a shard, computed in float64; the same anywhere."""
    return [orthonormality_error(head.double().cpu().numpy()) for head in shard.detach().split(head_dim)]
