"""Products with structured frozen rows: two batched products of small blocks for a large one.

With x = [x_0 … x_(a−1)] in pieces of b (see `factors`), of each token,

    z_n[i] = right[i, n] · x_i        the right factor, `[a, m, b]`
    y_n    = left[n] z_n              the left factor, `[m, a, a]`

and y = [y_0 … y_(m−1)], queries above keys as in the dense bank. No operand is ever copied to
another order: the intermediate result has the layout `[a, m, tokens]`, from which BLAS reads the
matrices of both products directly, and results are written to their final places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """Structured rows of one rank, as its buffers.

    `[a, m, b]` and `[m, a, a]`, m·a rows of a·b columns.
    """

    right: torch.Tensor
    left: torch.Tensor

    def rows(self) -> torch.Tensor:
        """Return the rows of these factors, `[m * a, a * b]`.

        Each entry is one product, in the same type.
        """
        products = self.left.unsqueeze(-1) * self.right.transpose(0, 1).unsqueeze(1)
        return products.flatten(2).flatten(0, 1)


def project(hidden_states: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Multiply by structured rows: x Wᵀ with W = `factors.rows()`, which is never made.

    Args:
        hidden_states: `[..., a * b]`.
        factors: factors of the rows, of m blocks.

    Returns:
        `[..., m * a]`, contiguous.
    """
    right, left = factors
    pieces, blocks, width = right.shape
    compute = _project_at_once if torch.compiler.is_compiling() else _project
    rows = compute(hidden_states.reshape(-1, pieces * width), right, left)
    return rows.view(*hidden_states.shape[:-1], blocks * pieces)


def add_input_grad(grad: torch.Tensor, factors: Factors, total: torch.Tensor) -> torch.Tensor:
    """Add the gradient of `project`'s input to `total`, in place.

    Args:
        grad: gradient of the product, `[..., m * a]`.
        total: gradient so far, `[tokens, a * b]`, contiguous; it is overwritten.

    Returns:
        The sum, `[tokens, a * b]`.
    """
    right, left = factors
    add = _add_at_once if torch.compiler.is_compiling() else _add_input_grad
    add(grad.flatten(0, -2), right, left, total)
    return total


def factor_grads(grad: torch.Tensor, inputs: torch.Tensor, factors: Factors) -> Factors:
    """Return the gradients of the factors of `project`.

    Args:
        grad: gradient of the product, `[..., m * a]`.
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


def _project(inputs: torch.Tensor, right: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Multiply `[tokens, a * b]` by both factors: `[tokens, m * a]`, contiguous."""
    pieces, blocks, width = right.shape
    # Both products write their results where the next step reads them: nothing is copied.
    between = torch.bmm(right, inputs.view(-1, pieces, width).permute(1, 2, 0))  # [a, m, tokens]
    outputs = inputs.new_empty(len(inputs), blocks, pieces)
    torch.bmm(between.permute(1, 2, 0), left.mT, out=outputs.transpose(0, 1))
    return outputs.view(-1, blocks * pieces)


def _add_input_grad(
    grad: torch.Tensor, right: torch.Tensor, left: torch.Tensor, total: torch.Tensor
) -> None:
    """Add the gradient of `_project`'s input, `[tokens, a * b]`, to `total`."""
    pieces, blocks, width = right.shape
    outputs = grad.reshape(-1, blocks, pieces)
    between = grad.new_empty(pieces, blocks, len(outputs))
    torch.bmm(left.mT, outputs.permute(1, 2, 0), out=between.transpose(0, 1))
    total.view(-1, pieces, width).transpose(0, 1).baddbmm_(between.mT, right)


# To a compiler each is one operator. It would else have every product write a tensor of its own,
# and copy that to the place where the result belongs.
_project_at_once = torch.library.custom_op("ora_pretrain::project", _project, mutates_args=())
_add_at_once = torch.library.custom_op(
    "ora_pretrain::add_input_grad", _add_input_grad, mutates_args=("total",)
)


@_project_at_once.register_fake
def _(inputs: torch.Tensor, right: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return inputs.new_empty(len(inputs), left.size(0) * left.size(1))
