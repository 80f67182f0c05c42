"""Products with structured frozen rows: two batched products of small blocks in place of one large product.

With x = [x_0 … x_(a−1)] in pieces of b (see `factors`), of each token,

    z_n[i] = right[i, n] · x_i        the right factor, `[a, m, b]`
    y_n    = left[n] z_n              the left factor, `[m, a, a]`

and y = [y_0 … y_(m−1)], queries above keys as in the dense bank. No operand is ever copied to another order:
the intermediate result has the layout `[a, m, tokens]`, from which BLAS reads the matrices of both products
directly, and results are written to their final places. Gradients need the factors only.

All products with structured rows use these two functions. Given a `Tile`, each is one kernel instead
(`monarch_kernel`), which keeps the intermediate result on chip.
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
        """Return the rows of these factors, `[m * a, a * b]`: each entry is one product, in the same type."""
        products = self.left.unsqueeze(-1) * self.right.transpose(0, 1).unsqueeze(1)
        return products.flatten(2).flatten(0, 1)


def project(hidden_states: torch.Tensor, factors: Factors, tile: Tile | None = None) -> torch.Tensor:
    """Multiply `[..., a * b]` by `factors.rows()` transposed: `[..., m * a]`, contiguous."""
    right, left = factors
    pieces, blocks, width = right.shape
    if tile is not None:
        rows = two_products(hidden_states.flatten(0, -2), right, left, None, [*tile])
        return rows.view(*hidden_states.shape[:-1], blocks * pieces)
    inputs = hidden_states.reshape(-1, pieces, width)
    between = torch.bmm(right, inputs.permute(1, 2, 0))  # [a, m, tokens]
    outputs = hidden_states.new_empty(inputs.size(0), blocks, pieces)
    _multiply(between.permute(1, 2, 0), left.mT, outputs.transpose(0, 1))
    return outputs.view(*hidden_states.shape[:-1], blocks * pieces)


def add_input_grad(
    grad: torch.Tensor, factors: Factors, total: torch.Tensor, tile: Tile | None = None
) -> torch.Tensor:
    """Add the gradient of `project`'s input to `total`, in place unless by the kernel.

    Args:
        grad: `[..., m * a]`, of the output.
        total: `[tokens, a * b]`, contiguous.
    """
    right, left = factors
    if tile is not None:
        return two_products(grad.flatten(0, -2), left.mT, right.mT, total, [*tile])
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


def factor_grads(grad: torch.Tensor, inputs: torch.Tensor, factors: Factors) -> Factors:
    """Return the gradients of the factors of `project`, in their shapes.

    Args:
        grad: `[..., m * a]`, of the output.
        inputs: `[tokens, a * b]`.
    """
    right, left = factors
    pieces, blocks, width = right.shape
    by_piece = inputs.reshape(-1, pieces, width)
    outputs = grad.reshape(-1, blocks, pieces).permute(1, 2, 0)  # [m, a, tokens]
    between = torch.bmm(right, by_piece.permute(1, 2, 0))  # [a, m, tokens]
    between_grad = torch.bmm(left.mT, outputs)  # [m, a, tokens]
    return Factors(
        torch.bmm(between_grad.transpose(0, 1), by_piece.transpose(0, 1)),
        torch.bmm(outputs, between.permute(1, 2, 0)),
    )


def _multiply(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> None:
    """Multiply two batches of matrices into a view; a compiler chooses the layout itself."""
    if torch.compiler.is_compiling():
        result.copy_(torch.bmm(first, second))
    else:
        torch.bmm(first, second, out=result)
