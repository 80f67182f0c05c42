"""The blocks of logical parameters that a tensor-parallel rank holds.

A logical parameter is the whole tensor as one process without parallelism would hold it. A
tensor-parallel rank holds one block of that tensor, from `first` up to `last` along one dimension;
a parameter replicated over tensor-parallel ranks is one block, the whole tensor. Where only some
heads are frozen, ranks hold unequal numbers of trainable heads and of the frozen heads' adapters,
or none. A tensor of several parts, such as the queries and keys of trainable heads, counts as one
logical parameter per part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_patches.recipe.parts import Tensor
from pretrain.checkpoint.format import Block


@dataclass(frozen=True)
class Part:
    """A block of a logical parameter, held by this rank.

    Attributes:
        name: Name of the logical parameter.
        shape: Shape of the whole logical parameter.
        block: This rank's block.
        start: Index of the block's first element in this rank's flattened parameter.
        replicated: Whether every tensor-parallel rank holds the same block.
    """

    name: str
    shape: tuple[int, ...]
    block: Block
    start: int
    replicated: bool

    @property
    def numel(self) -> int:
        """Return the number of elements that this rank holds."""
        return math.prod(self.block.shape(self.shape))


def parts_of_rank(inventory: Iterable[Tensor], rank: int, size: int) -> dict[str, tuple[Part, ...]]:
    """Return {name of a stored tensor: its parts} for a tensor-parallel rank.

    Args:
        inventory: All tensors of the model.
        rank: Tensor-parallel rank.
        size: Number of tensor-parallel ranks.
    """
    return {tensor.name: tuple(_parts(tensor, rank, size)) for tensor in inventory if tensor.stored}


def overlaps(
    start: int, length: int, parts: tuple[Part, ...]
) -> Iterator[tuple[Part, int, int, int]]:
    """Split elements [start, start + length) of this rank's flattened parameter by its parts.

    Args:
        start: First element.
        length: Number of elements.
        parts: Parts of the parameter, from `parts_of_rank`.

    Yields:
        (part, offset in the part's flattened block, offset in the range, number of elements).
    """
    for part in parts:
        first = max(start, part.start)
        last = min(start + length, part.start + part.numel)
        if first < last:
            yield part, first - part.start, first - start, last - first


def _parts(tensor: Tensor, rank: int, size: int) -> Iterator[Part]:
    """Yield the non-empty parts of a parameter."""
    replicated = size == 1 or tensor.cut is None
    dim = tensor.cut or 0
    start = 0
    for name, length in _logical(tensor):
        shape = (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
        block = Block.whole(shape)
        if not replicated:
            first = sum(tensor.share(length, earlier_rank, size) for earlier_rank in range(rank))
            block = Block(dim, first, first + tensor.share(length, rank, size))
        part = Part(name, shape, block, start, replicated=replicated)
        if part.numel:
            yield part
            start += part.numel


def _logical(tensor: Tensor) -> Iterator[tuple[str, int]]:
    """Yield (name, length along the cut dimension) of each logical parameter in a parameter.

    Each part is a logical parameter, because a rank holds a share of every part. A tensor that is
    not cut, or that repeats its parts, is a single one: a rank's share of it is contiguous.
    """
    if len(tensor.parts) == 1 or tensor.cut is None or tensor.repeats is not None:
        yield tensor.name, tensor.shape[tensor.cut or 0]
        return
    for weight, length in tensor.parts:
        suffix = weight.rpartition(".")[2]
        if tensor.name.endswith("query_key"):  # trained_query_key: trained_query, then trained_key
            yield tensor.name.removesuffix("query_key") + suffix, length
        else:
            yield f"{tensor.name}.{suffix}", length
