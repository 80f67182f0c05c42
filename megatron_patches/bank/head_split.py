"""Heads of a tensor-parallel rank, and which of them have frozen rows. No torch.

Rank r of N owns heads [r · heads / N, (r + 1) · heads / N) of each role, as in megatron-core.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_patches.bank.orthonormal import ROLES, Role
from megatron_patches.errors import MethodError


def heads_of_rank(
    num_heads: int, rank: int, tensor_parallel_size: int, name: str = "num_attention_heads"
) -> range:
    """Return the global head numbers of a role that a tensor-parallel rank owns.

    Args:
        num_heads: heads of all ranks.
        name: key of num_heads in the configuration, for the sentence that refuses it.

    Raises:
        MethodError: tensor_parallel_size does not divide num_heads, or there is no such rank.
    """
    if tensor_parallel_size < 1 or num_heads % tensor_parallel_size:
        raise MethodError(
            f"{name}={num_heads} is not divisible by "
            f"tensor_model_parallel_size={tensor_parallel_size}; choose a tensor-parallel size "
            "that divides it"
        )
    if not 0 <= rank < tensor_parallel_size:
        raise MethodError(
            f"tensor-parallel rank {rank} does not exist: "
            f"tensor_model_parallel_size={tensor_parallel_size}"
        )
    count = num_heads // tensor_parallel_size
    return range(rank * count, (rank + 1) * count)


@dataclass(frozen=True)
class HeadSplit:
    """Frozen and trainable heads of one rank: global head numbers in rising order, by role."""

    frozen: Mapping[Role, tuple[int, ...]]
    trainable: Mapping[Role, tuple[int, ...]]

    def order(self, role: Role) -> list[int]:
        """Return the permutation that sorts (frozen heads, then trainable heads) by head number."""
        numbers = self.frozen[role] + self.trainable[role]
        return sorted(range(len(numbers)), key=numbers.__getitem__)

    def sharing(self, queries_per_group: int) -> HeadSplit:
        """Return the split whose keys have the rows of the first query heads of their groups."""
        frozen, trainable = (
            {"query": heads["query"], "key": heads["query"][::queries_per_group]}
            for heads in (self.frozen, self.trainable)
        )
        return HeadSplit(frozen, trainable)  # type: ignore[arg-type]


def split_heads(
    num_heads: int,
    num_groups: int,
    frozen_groups: Collection[int],
    rank: int,
    tensor_parallel_size: int,
    roles: Collection[Role] = ROLES,
    shared: bool = False,
) -> HeadSplit:
    """Split the heads of a rank into those with frozen rows and the others.

    Args:
        num_heads: query heads of a layer.
        frozen_groups: groups in which the rows of `roles` are frozen.
        roles: roles whose rows are frozen.
        shared: keys have the rows of queries, so that no key head has rows of its own.

    Raises:
        MethodError: tensor_parallel_size does not divide the heads, or there is no such rank.
    """
    name = "num_query_groups" if num_groups != num_heads else "num_attention_heads"
    groups = heads_of_rank(num_groups, rank, tensor_parallel_size, name)
    heads = heads_of_rank(num_heads, rank, tensor_parallel_size)
    queries_per_group = num_heads // num_groups
    with_rows: dict[Role, range] = {"query": heads, "key": range(0) if shared else groups}
    members: dict[Role, int] = {"query": queries_per_group, "key": 1}
    frozen: dict[Role, tuple[int, ...]] = {}
    for role, numbers in with_rows.items():
        role_groups = frozen_groups if role in roles else ()
        frozen[role] = tuple(number for number in numbers if number // members[role] in role_groups)
    trainable = {
        role: tuple(number for number in numbers if number not in frozen[role])
        for role, numbers in with_rows.items()
    }
    return HeadSplit(frozen, trainable)
