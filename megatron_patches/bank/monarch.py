"""An input times structured frozen rows: two batched products of small blocks in place of one large product.

With x = [x_0 … x_(a−1)] in pieces of b (see `factors`), of each token,

    z_n[i] = right[i, n] · x_i        the right factor, `[a, m, b]`
    y_n    = left[n] z_n              the left factor, `[m, a, a]`

and y = [y_0 … y_(m−1)], queries above keys as their rows are in the dense bank. No operand is ever copied to
another order: what is between the two products lies as `[a, m, tokens]`, in which both find matrices that
BLAS takes as they are, and results are written where they belong. Gradients need the factors only.

These two functions are all that multiplies by structured rows. Given a `Tile`, each is one kernel instead
(`monarch_kernel`), which keeps what is between the two products on chip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_patches.bank.monarch_kernel import Tile, two_products


class Factors(NamedTuple):
    """Structured rows of one rank, as its buffers: `[a, m, b]` and `[m, a, a]`, m·a rows of a·b columns."""

    right: torch.Tensor
    left: torch.Tensor

    def rows(self) -> torch.Tensor:
        """The rows that they stand for, `[m * a, a * b]`: each entry is one product, in the factors' type."""
        products = self.left.unsqueeze(-1) * self.right.transpose(0, 1).unsqueeze(1)
        return products.flatten(2).flatten(0, 1)


def project(hidden_states: torch.Tensor, factors: Factors, tile: Tile | None = None) -> torch.Tensor:
    """`[..., a * b]` -> `[..., m * a]`, contiguous: the product with `factors.rows()` transposed."""
    right, left = factors
    pieces, blocks, width = right.shape
    if tile is not None:
        rows = two_products(hidden_states.flatten(0, -2), right, left, None, [], 1, [*tile])
        return rows.view(*hidden_states.shape[:-1], blocks * pieces)
    inputs = hidden_states.reshape(-1, pieces, width)
    between = torch.bmm(right, inputs.permute(1, 2, 0))  # [a, m, tokens]
    outputs = hidden_states.new_empty(inputs.size(0), blocks, pieces)
    _multiply(between.permute(1, 2, 0), left.mT, outputs.transpose(0, 1))
    return outputs.view(*hidden_states.shape[:-1], blocks * pieces)


def add_input_grad(
    grad: torch.Tensor, factors: Factors, total: torch.Tensor, tile: Tile | None = None
) -> torch.Tensor:
    """The gradient of `project`'s input added to `total`, in place but for the kernel.

    Args:
        grad: `[..., m * a]`, of the output.
        total: `[tokens, a * b]`, contiguous.
    """
    right, left = factors
    if tile is not None:
        return two_products(grad.flatten(0, -2), left.mT, right.mT, total, [], 1, [*tile])
    pieces, blocks, width = right.shape
    outputs = grad.reshape(-1, blocks, pieces)
    between = grad.new_empty(pieces, blocks, len(outputs))
    _multiply(left.mT, outputs.permute(1, 2, 0), between.transpose(0, 1))
    inputs = total.view(-1, pieces, width).transpose(0, 1)
    if torch.compiler.is_compiling():
        inputs.add_(torch.bmm(between.mT, right))
    else:
        inputs.baddbmm_(between.mT, right)
    return total


def _multiply(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> None:
    """Matrix products of two batches, written into a view; a compiler chooses the places itself."""
    if torch.compiler.is_compiling():
        result.copy_(torch.bmm(first, second))
    else:
        torch.bmm(first, second, out=result)
