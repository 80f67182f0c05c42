"""Orthonormal rows of a whole layer as two sets of small random orthogonal blocks.

These are Monarch matrices (Dao et al. 2022).

    W = blockdiag(A_0 … A_(b−1)) P blockdiag(B_0 … B_(a−1)),      hidden_size = a · b

B_i is b × b and reads the i-th piece of b inputs; P puts the j-th result of every piece together;
A_j is a × a and makes rows j a … (j + 1) a − 1 of them. Every factor is orthogonal, so W Wᵀ = I,
and so it is for any choice of its rows. As an input reaches an output on one path only, every entry
of W is one product,

    W[j a + r, i b + c] = A_j[r, i] · B_i[j, c]

of mean 0 and variance 1/(a b) = 1/hidden_size. Blocks are independent, each from the random stream
named by (seed, layer, role, factor, block), and Haar: products of random reflectors (Stewart, SINUM
17, 1980).

Made of elementwise float64 `+ - * /` and `sqrt` in a fixed order: the bits depend on no BLAS,
mathematics library, CPU model or thread count, nor on which other blocks were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megatron_patches.bank.exact import FloatArray
from megatron_patches.bank.gaussian import GRID
from megatron_patches.errors import MethodError

Factor = Literal["left", "right"]
FACTORS: tuple[Factor, ...] = ("left", "right")

STREAM_DOMAIN = 0x4F5243
"""First word of the streams' key; those of `orthonormal` are others."""


def block_sizes(hidden_size: int, head_dim: int) -> tuple[int, int]:
    """Choose the block sizes (a, b): a · b = hidden_size, a divides head_dim, and a + b is least.

    The rows of a head, and of any set of heads, are then whole blocks of the left factor. Where (a,
    b) and (b, a) are both possible, a is the smaller one.

    Raises:
        MethodError: a or b would have to be 1.
    """
    possible = [
        (a, hidden_size // a)
        for a in range(2, head_dim + 1)
        if head_dim % a == 0 and hidden_size % a == 0 and a < hidden_size
    ]
    if not possible:
        raise MethodError(
            f"hidden_size={hidden_size} has no factor above 1 and below itself that divides "
            f"head_dim={head_dim} too: a 'monarch' bank needs one; choose other sizes, or another "
            "construction"
        )
    return min(possible, key=sum)


class LayerFactors(NamedTuple):
    """Factors of some heads' rows of W_Q, then of W_K, in one layer: m blocks in the left one.

    Attributes:
        right: `[a, m, b]`; right[i, n] is the row of B_i whose result is an input of block n of the
            left factor.
        left: `[m, a, a]`.
    """

    right: FloatArray
    left: FloatArray

    def rows(self) -> FloatArray:
        """Return the rows of these factors, `[m * a, hidden_size]`; an entry is one product."""
        blocks, a, _ = self.left.shape
        products = self.left[:, :, :, None] * self.right.transpose(1, 0, 2)[:, None]
        return products.reshape(blocks * a, a * self.right.shape[2])


def layer_factors(
    seed: int,
    layer: int,
    hidden_size: int,
    head_dim: int,
    heads: Sequence[tuple[int, Sequence[int]]],
) -> LayerFactors:
    """Draw the factors of some heads' rows.

    Args:
        layer: number of the layer, from 0.
        heads: (number of a role, numbers of its heads), in the order of the rows.

    Raises:
        MethodError: the sizes have no blocks, see `block_sizes`.
    """
    a, b = block_sizes(hidden_size, head_dim)
    blocks_of_head = range(head_dim // a)
    block_numbers = [
        (role, [head * len(blocks_of_head) + n for head in role_heads for n in blocks_of_head])
        for role, role_heads in heads
    ]
    lefts = [Block(role, "left", number) for role, numbers in block_numbers for number in numbers]
    rights = [Block(role, "right", number) for role, _ in block_numbers for number in range(a)]
    # Blocks of one size are drawn together, which takes less time.
    if a == b:
        blocks = haar_blocks(seed, layer, lefts + rights, a)
        left = blocks[: len(lefts)]
        right = blocks[len(lefts) :]
    else:
        left = haar_blocks(seed, layer, lefts, a)
        right = haar_blocks(seed, layer, rights, b)
    by_role = right.reshape(len(heads), a, b, b)
    pieces = [
        blocks_of_role[:, numbers]
        for blocks_of_role, (_, numbers) in zip(by_role, block_numbers, strict=True)
    ]
    return LayerFactors(right=np.concatenate(pieces, axis=1), left=left)


class Block(NamedTuple):
    """Position of a block: number of its role, factor, number within the factor."""

    role: int
    factor: Factor
    number: int


def haar_blocks(seed: int, layer: int, blocks: Sequence[Block], size: int) -> FloatArray:
    """Draw Haar orthogonal blocks, each from its own random stream.

    Blocks made together take less time than one after the other, and have the same bits.

    Args:
        layer: number of the layer, from 0.
        size: rows of a block, at least 2.

    Returns:
        Float64 `[len(blocks), size, size]`.
    """
    # A reflector of m dimensions needs m deviates: size + (size − 1) + … + 1 for a block.
    # Two blocks at least: of one alone numpy would sum in another order.
    deviates = np.zeros((max(2, len(blocks)), size * (size + 1) // 2))
    for block_deviates, stream in zip(deviates, _streams(seed, layer, blocks), strict=False):
        stream.standard_normal(out=block_deviates)
    return _products_of_reflectors(np.rint(deviates.T * GRID) / GRID, size)[: len(blocks)]


def _streams(seed: int, layer: int, blocks: Sequence[Block]) -> Iterator[np.random.Generator]:
    """Yield the random stream of each block; see the module."""
    key = np.random.SeedSequence(seed, spawn_key=(STREAM_DOMAIN, layer)).generate_state(
        2, np.uint64
    )
    for role, factor, number in blocks:
        yield np.random.Generator(
            np.random.Philox(key=key, counter=[0, role, number, FACTORS.index(factor)])
        )


def _products_of_reflectors(deviates: FloatArray, size: int) -> FloatArray:
    """Multiply reflectors H_0 H_1 …, signs corrected; H_j maps a random vector to axis j.

    Args:
        deviates: `[size (size + 1) / 2, blocks]`, size − j of them for H_j. Blocks come last, so
            that every operation runs along memory.

    Returns:
        `[blocks, size, size]`.
    """
    products = np.zeros((size, size, deviates.shape[1]))
    end = len(deviates)
    for j in reversed(range(size)):
        vector = deviates[end - (size - j) : end].copy()
        end -= size - j
        # The sign that avoids cancellation; column j is corrected by it below, for Haar measure.
        sign = np.where(vector[0] < 0, -1.0, 1.0)
        vector[0] += sign * np.sqrt(_sum(vector * vector))
        length = _sum(vector * vector)
        remaining = products[j:, j:]
        remaining[0, 0] = 1.0
        # A reflector of nothing is the identity.
        scale = np.divide(2.0, length, out=np.zeros_like(length), where=length > 0)
        remaining -= vector[:, None] * (scale * _sum(vector[:, None] * remaining))
        remaining[:, 0] *= np.where(length > 0, -sign, 1.0)
    return np.ascontiguousarray(products.transpose(2, 0, 1))


def _sum(terms: FloatArray) -> FloatArray:
    """Sum over the first of several axes, term by term: numpy sums in pairs along memory only."""
    total: FloatArray = np.add.reduce(terms, axis=0)
    return total
