"""Where this rank's parameters lie in the whole model's, whatever cut them.

A logical parameter is the whole tensor as one process without parallelism would hold it. A tensor-parallel
rank holds a block of it, from `first` up to `last` along one dimension; parameters that are replicated over
tensor-parallel ranks are one block, the whole. The trainable heads beside a frozen bank are two logical
parameters, queries and keys: one rank's lie behind each other in one tensor, and ranks hold unequal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_patches.attention import FrozenQueryKeyValueLinear
from megatron_patches.orthonormal import ROLES
from megatron_patches.shards import split_heads


@dataclass(frozen=True)
class Block:
    """The elements of a tensor whose index along `dim` is from `first` up to, without, `last`."""

    dim: int
    first: int
    last: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Block:
        return cls(0, 0, shape[0])

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """The block's own shape, in a tensor of shape `full`."""
        return (*full[: self.dim], self.last - self.first, *full[self.dim + 1 :])

    def rows(self, full: tuple[int, ...]) -> tuple[int, int] | None:
        """Its place in the flattened tensor, [start, stop); None if it does not lie there in one piece."""
        if self.shape(full) == full:
            return 0, math.prod(full)
        row = math.prod(full[1:])
        return (self.first * row, self.last * row) if self.dim == 0 else None


@dataclass(frozen=True)
class Part:
    """A block of the logical parameter `name`, and where it begins in this rank's flattened parameter.

    Attributes:
        shape: of the logical parameter.
        replicated: every tensor-parallel rank holds the same.
    """

    name: str
    shape: tuple[int, ...]
    block: Block
    start: int
    replicated: bool

    @property
    def numel(self) -> int:
        return math.prod(self.block.shape(self.shape))


def parts_of_rank(model: torch.nn.Module, rank: int, size: int) -> dict[str, tuple[Part, ...]]:
    """What every parameter of this tensor-parallel rank, `rank` of `size`, is of the logical ones."""
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        prefix, _, own_name = name.rpartition(".")
        owner = modules[prefix]
        if isinstance(owner, FrozenQueryKeyValueLinear) and own_name == "trained_query_key":
            found[name] = tuple(_trained_heads(prefix, owner, rank, size))
        else:
            found[name] = (_part(name, parameter, rank, size),)
    return found


def overlaps(start: int, length: int, parts: tuple[Part, ...]) -> Iterator[tuple[Part, int, int, int]]:
    """What elements [start, start + length) of this rank's flattened parameter are of its parts.

    Yields:
        (part, where in its flattened block, where in the range, how many).
    """
    for part in parts:
        first, last = max(start, part.start), min(start + length, part.start + part.numel)
        if first < last:
            yield part, first - part.start, first - start, last - first


def _part(name: str, parameter: torch.nn.Parameter, rank: int, size: int) -> Part:
    local = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves it empty
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Part(name, local, Block.whole(local), 0, replicated=True)
    dim = parameter.partition_dim  # type: ignore[attr-defined]  # megatron-core's mark
    length = local[dim]
    full = (*local[:dim], length * size, *local[dim + 1 :])
    return Part(name, full, Block(dim, rank * length, (rank + 1) * length), 0, replicated=False)


def _trained_heads(prefix: str, owner: FrozenQueryKeyValueLinear, rank: int, size: int) -> Iterator[Part]:
    """One rank's trainable queries, then its keys; the heads of a role lie in the order of the ranks."""
    recipe = owner.recipe
    start = 0
    for role in ROLES:
        rows = [
            recipe.head_dim
            * len(
                split_heads(
                    recipe.num_attention_heads, recipe.num_query_groups, owner.frozen_groups, other, size
                ).trainable[role]
            )
            for other in range(size)
        ]
        before, own = sum(rows[:rank]), rows[rank]
        if own:
            shape = (sum(rows), recipe.hidden_size)
            block = Block(0, before, before + own)
            yield Part(f"{prefix}.trained_{role}", shape, block, start, replicated=size == 1)
            start += own * recipe.hidden_size
