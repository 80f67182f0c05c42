"""Which heads a tensor-parallel rank owns, its shard of the frozen bank, and digests to know a bank by.

Rank r of N owns heads [r · heads / N, (r + 1) · heads / N) of each role, as megatron-core does. A shard is
made of its own heads only, so making it costs 1/N of the whole bank, and the heads' bits do not depend on N.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_patches.bank.exact import orthonormality_error
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role, factors_of_heads
from megatron_patches.bank.rows import bank_rows
from megatron_patches.errors import MethodError


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
    recipe: BankRecipe,
    layer: int,
    role: Role,
    rank: int,
    tensor_parallel_size: int,
    dtype: torch.dtype,
    frozen_groups: Sequence[int] | None = None,
) -> torch.Tensor:
    """One rank's frozen rows of one role in one layer: CPU tensor [local_heads * head_dim, hidden_size].

    Heads are in global order; the float64 rows are cast to `dtype` once.

    Args:
        layer: global layer number, from 0.
        frozen_groups: global numbers of the key heads whose group is frozen; None: all of them.

    Raises:
        MethodError: tensor_parallel_size does not divide num_query_groups; no such layer, role or rank.
    """
    groups = range(recipe.num_query_groups) if frozen_groups is None else frozen_groups
    split = split_heads(
        recipe.num_attention_heads, recipe.num_query_groups, groups, rank, tensor_parallel_size
    )
    return head_rows_in(recipe, layer, role, split.frozen[role], dtype)


def head_rows_in(
    recipe: BankRecipe, layer: int, role: Role, heads: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Rows of several heads of one role as training has them: CPU tensor `[heads * head_dim, hidden_size]`.

    Those of a structured bank are products of factors that were cast, not products that were.

    Raises:
        MethodError: as `bank_rows`.
    """
    if recipe.structured:
        return _factors(recipe, layer, [(role, heads)], dtype).rows()
    return torch.from_numpy(bank_rows(recipe, layer, role, heads)).to(dtype)


def rank_factors(recipe: BankRecipe, layer: int, heads: HeadSplit, dtype: torch.dtype) -> Factors:
    """The factors of a rank's frozen rows, queries above keys, on the CPU; the recipe is `structured`."""
    return _factors(recipe, layer, [(role, heads.frozen[role]) for role in ROLES], dtype)


def _factors(
    recipe: BankRecipe, layer: int, heads: Sequence[tuple[Role, Sequence[int]]], dtype: torch.dtype
) -> Factors:
    made = factors_of_heads(recipe, layer, heads)
    right, left = (torch.from_numpy(factor).to(dtype).contiguous() for factor in (made.right, made.left))
    return Factors(right, left)


@dataclass(frozen=True)
class HeadSplit:
    """Which of a rank's heads are frozen and which train: global head numbers in rising order, by role."""

    frozen: Mapping[Role, tuple[int, ...]]
    trainable: Mapping[Role, tuple[int, ...]]

    def order(self, role: Role) -> list[int]:
        """Positions in (frozen heads, then trainable heads) that put them into the order of their numbers."""
        heads = self.frozen[role] + self.trainable[role]
        return sorted(range(len(heads)), key=heads.__getitem__)


def split_heads(
    num_heads: int, num_groups: int, frozen_groups: Collection[int], rank: int, tensor_parallel_size: int
) -> HeadSplit:
    """One rank's heads, split by whether their group is frozen.

    Raises:
        MethodError: tensor_parallel_size does not divide num_groups; no such rank.
    """
    name = "num_query_groups" if num_groups != num_heads else "num_attention_heads"
    groups = heads_of_rank(num_groups, rank, tensor_parallel_size, name)
    heads = heads_of_rank(num_heads, rank, tensor_parallel_size)
    queries_per_group = num_heads // num_groups
    frozen = {
        "query": tuple(head for head in heads if head // queries_per_group in frozen_groups),
        "key": tuple(group for group in groups if group in frozen_groups),
    }
    trainable = {
        "query": tuple(head for head in heads if head // queries_per_group not in frozen_groups),
        "key": tuple(group for group in groups if group not in frozen_groups),
    }
    return HeadSplit(frozen, trainable)  # type: ignore[arg-type]


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
