"""The matrices in the tensors of the inventory that Muon orthogonalises, each by itself. No torch.

Queries and keys are a matrix a head, so that each lies on one tensor-parallel rank. Values, the
output projection and each weight of an MLP are whole matrices over all ranks. Trained factors of
structured rows are a matrix a block of the left factor, and one of the rows of the right factor
that feed it. This follows from what a tensor declares, never from how it is stored: W_V is the same
matrix within a fused W_QKV as where it stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron_patches.recipe.parts import Tensor

AT_A_TIME = 2**24
"""Elements that are orthogonalised at a time, which bounds the memory of an update: 64 MiB."""

HALVED = 512
"""Least smaller side of a matrix, if even, whose symmetric products take three quarters."""


@dataclass(frozen=True)
class Stack:
    """Equally shaped matrices of one part of a tensor.

    Attributes:
        count: number of matrices.
        rows, columns: size of each matrix.
        height: rows of the tensor that make one matrix.
    """

    count: int
    rows: int
    columns: int
    height: int

    def flops(self, steps: int) -> int:
        """Return the FLOPs of the matrices' Newton-Schulz iterations.

        An iteration multiplies X by its transpose, the product by itself, and the result by X. The
        first two are symmetric.
        """
        small = min(self.rows, self.columns)
        large = max(self.rows, self.columns)
        symmetric = 2 * small**2 * (large + small)
        if halves(small):
            symmetric = symmetric * 3 // 4
        return self.count * steps * (symmetric + 2 * small**2 * large)


def halves(side: int) -> bool:
    """Return whether symmetric products `[side, side]` are computed from three quarters."""
    return side >= HALVED and side % 2 == 0


@dataclass(frozen=True)
class Run:
    """Elements of a matrix that lie one behind the other in a rank's flattened tensor.

    A matrix is flattened as the shares of the tensor-parallel ranks, one behind the other, each row
    by row. Where columns are cut this is not the order of the whole matrix.

    Attributes:
        stack: number of the stack within the tensor.
        matrix: number of the matrix within the stack.
        start: first element in the flattened matrix.
        rank_start: first element in the rank's flattened tensor.
        length: elements.
    """

    stack: int
    matrix: int
    start: int
    rank_start: int
    length: int


def has_matrices(tensor: Tensor) -> bool:
    """Return whether a tensor is trained matrices of a layer that every token is multiplied by.

    Embeddings, the output layer, vectors, score matrices and the weights of adapters are not.
    """
    matrix = tensor.kind == "ordinary" and tensor.multiplied and len(tensor.shape) > 1
    return matrix and tensor.trains and tensor.layer is not None


def stacks(tensor: Tensor) -> tuple[Stack, ...]:
    """Return the matrices of a tensor, a stack for each of its parts.

    Args:
        tensor: its declaration, `[rows, columns]` or, for factors, `[blocks, rows, columns]`.
    """
    matrix_stacks = []
    for name, length in tensor.parts:
        if len(tensor.shape) == 3:
            matrix_stacks.append(Stack(length, *tensor.shape[1:], height=1))
            continue
        height = length
        if tensor.head_rows is not None and name.rpartition(".")[2] in ("query", "key"):
            height = tensor.head_rows
        matrix_stacks.append(Stack(length // height, height, tensor.shape[1], height=height))
    return tuple(matrix_stacks)


def runs(tensor: Tensor, rank: int, size: int) -> Iterator[Run]:
    """Yield what a tensor-parallel rank holds of each matrix, in the order of its tensor."""
    width = prod(tensor.rank_shape(rank, size)[1:])
    pieces = tensor.repeats // size if tensor.repeats else 1
    kinds = stacks(tensor)
    rank_start = 0
    for piece in range(pieces):
        for number, (_, length) in enumerate(tensor.parts):
            height = kinds[number].height
            first, rows = _rows(tensor, length, rank, size)
            # Interleaved parts, as in W_QKV: this piece has an equal share of the rank's rows.
            if tensor.repeats:
                rows //= pieces
                first += piece * rows
            offset = rank * length * width if tensor.cut == 1 else 0
            # A rank's rows may begin and end inside a matrix: cut them at its boundaries.
            while rows:
                taken = min(rows, height - first % height)
                start = offset + first % height * width
                yield Run(
                    number, first // height, start, rank_start=rank_start, length=taken * width
                )
                first += taken
                rows -= taken
                rank_start += taken * width


def _rows(tensor: Tensor, length: int, rank: int, size: int) -> tuple[int, int]:
    """Return (first, number) of the rows of a part that a rank has."""
    if tensor.cut != 0:
        return 0, length
    # Ranks may have unequal shares, see `Tensor.groups`.
    first = sum(tensor.share(length, lower_rank, size) for lower_rank in range(rank))
    return first, tensor.share(length, rank, size)
