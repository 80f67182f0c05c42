"""The blocks of logical parameters that a tensor-parallel rank holds.

A logical parameter is the whole tensor as one process without parallelism would hold it. A tensor-parallel
rank holds one block of that tensor, from `first` up to `last` along one dimension; a parameter replicated
over tensor-parallel ranks is one block, the whole. Where only some heads are frozen, ranks hold unequal
numbers of trainable heads and of the frozen heads' adapters, or none. The trainable heads are two logical
parameters, queries and keys, which follow each other in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_patches.attention.adapters import QueryKeyAdapters
from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.orthonormal import ROLES
from megatron_patches.bank.shards import HeadSplit, split_heads
from pretrain.checkpoint.format import Block


@dataclass(frozen=True)
class Part:
    """A block of the logical parameter `name`, held by this rank.

    Attributes:
        shape: shape of the logical parameter.
        start: index of the block's first element in this rank's flattened parameter.
        replicated: every tensor-parallel rank holds the same block.
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
    """Return {parameter's name: its parts} for tensor-parallel rank `rank` of `size`."""
    modules = dict(model.named_modules())
    parts: dict[str, tuple[Part, ...]] = {}
    for name, parameter in model.named_parameters():
        prefix, _, own_name = name.rpartition(".")
        owner = modules[prefix]
        if isinstance(owner, FrozenQueryKeyValueLinear) and own_name == "trained_query_key":
            parts[name] = tuple(_trained_heads(prefix, owner, rank, size))
        elif isinstance(owner, QueryKeyAdapters):
            projection = modules[prefix.rpartition(".")[0]]
            assert isinstance(projection, FrozenQueryKeyValueLinear)
            parts[name] = tuple(_adapter(name, parameter, projection, rank, size))
        else:
            parts[name] = (_part(name, parameter, rank, size),)
    return parts


def overlaps(start: int, length: int, parts: tuple[Part, ...]) -> Iterator[tuple[Part, int, int, int]]:
    """Split elements [start, start + length) of this rank's flattened parameter by its parts.

    Yields:
        (part, offset in the part's flattened block, offset in the range, number of elements).
    """
    for part in parts:
        first, last = max(start, part.start), min(start + length, part.start + part.numel)
        if first < last:
            yield part, first - part.start, first - start, last - first


def local_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the shape of this rank's parameter; ZeRO-3 leaves an empty tensor in the parameter's place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _part(name: str, parameter: torch.nn.Parameter, rank: int, size: int) -> Part:
    local = local_shape(parameter)
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Part(name, local, Block.whole(local), 0, replicated=True)
    dim = parameter.partition_dim  # type: ignore[attr-defined]  # megatron-core's mark
    length = local[dim]
    full = (*local[:dim], length * size, *local[dim + 1 :])
    return Part(name, full, Block(dim, rank * length, (rank + 1) * length), 0, replicated=False)


def _trained_heads(prefix: str, owner: FrozenQueryKeyValueLinear, rank: int, size: int) -> Iterator[Part]:
    """Yield the rank's trainable queries, then its keys."""
    start = 0
    for role in ROLES:
        heads = [split.trainable[role] for split in _splits(owner, size)]
        rows = [len(own) * owner.recipe.head_dim for own in heads]
        part = _rows(f"{prefix}.trained_{role}", rows, (owner.recipe.hidden_size,), rank, start)
        if part.numel:
            yield part
            start += part.numel


def _adapter(
    name: str, parameter: torch.nn.Parameter, owner: FrozenQueryKeyValueLinear, rank: int, size: int
) -> Iterator[Part]:
    """Yield the part of an adapter's parameter, unless the rank has no frozen heads."""
    role, rows_per_head = parameter.role, parameter.rows_per_head  # type: ignore[attr-defined]
    rows = [len(split.frozen[role]) * rows_per_head for split in _splits(owner, size)]
    part = _rows(name, rows, local_shape(parameter)[1:], rank, 0)
    if part.numel:
        yield part


def _splits(owner: FrozenQueryKeyValueLinear, size: int) -> list[HeadSplit]:
    """Return the heads of every rank."""
    recipe = owner.recipe
    return [
        split_heads(recipe.num_attention_heads, recipe.num_query_groups, owner.frozen_groups, rank, size)
        for rank in range(size)
    ]


def _rows(name: str, rows: list[int], others: tuple[int, ...], rank: int, start: int) -> Part:
    """Return rank `rank`'s part of a parameter whose rows lie in the order of the ranks, `rows` on each."""
    first = sum(rows[:rank])
    block = Block(0, first, first + rows[rank])
    return Part(name, (sum(rows), *others), block, start, replicated=len(rows) == 1)
