"""Newton-Schulz iterations of stacks of matrices, and copies between flat tensors and stacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from megatron_patches.recipe.matrices import halves

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Coefficients of X, (X Xᵀ) X and (X Xᵀ)² X (Jordan 2024), which drive singular values near 1."""
EPSILON = 1e-7
"""Smallest divisor of a matrix, so that a zero matrix stays zero."""


def newton_schulz(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the matrices with their singular values driven near 1.

    X ← X / max(‖X‖_F, 1e-7), then `steps` times X ← a X + (b G + c G²) X with G = X Xᵀ, on the
    transposed matrices where there are more rows than columns.

    Args:
        matrices: `[count, rows, columns]`, contiguous; they may be overwritten.
        steps: Number of iterations.

    Returns:
        `[count, rows, columns]` of the same type.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT.contiguous() if tall else matrices
    # The iteration converges only from singular values of at most 1, which ‖X‖_F bounds.
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x.div_(norms.clamp(min=EPSILON))
    gram = x.new_empty(x.size(0), x.size(1), x.size(1))
    polynomial = torch.empty_like(gram)
    following = torch.empty_like(x)
    for _ in range(steps):
        _symmetric(gram, x, x.mT, out=gram, beta=0.0)
        _symmetric(gram, gram, gram, out=polynomial, beta=b, alpha=c)
        _products(x, polynomial, x, beta=a, out=following)
        x, following = following, x
    return x.mT if tall else x


def _symmetric(
    base: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    out: torch.Tensor,
    beta: float,
    alpha: float = 1.0,
) -> None:
    """Write beta · base + alpha · left @ right, which is symmetric, into `out`."""
    side = out.size(1)
    if not halves(side):
        _products(base, left, right, beta=beta, alpha=alpha, out=out)
        return
    top = slice(side // 2)
    below = slice(side // 2, side)
    for rows, columns in ((top, slice(side)), (below, below)):
        _products(
            base[:, rows, columns],
            left[:, rows],
            right[:, :, columns],
            beta=beta,
            alpha=alpha,
            out=out[:, rows, columns],
        )
    # The lower left block mirrors the upper right one; copying it is cheaper than its product.
    out[:, below, top].copy_(out[:, top, below].mT)


def _products(
    base: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    out: torch.Tensor,
    beta: float,
    alpha: float = 1.0,
) -> None:
    """Write beta · base + alpha · left @ right into `out`, rounded once to its type."""
    if out.dtype != torch.bfloat16 or out.device.type != "cpu" or cpu_multiplies_bf16():
        torch.baddbmm(base, left, right, beta=beta, alpha=alpha, out=out)
        return
    # Emulated bf16 is many times slower than fp32, whose sums are the same up to their order.
    operands = (base.float(), left.float(), right.float())
    out.copy_(torch.baddbmm(*operands, beta=beta, alpha=alpha))


def cpu_multiplies_bf16() -> bool:
    """Return whether the CPU has instructions for products in bf16, which it else emulates."""
    # Older versions of torch do not say.
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


@dataclass(frozen=True)
class Copy:
    """Elements to copy between one of several flat tensors and a buffer, or back.

    Attributes:
        tensor: Number of the flat tensor.
        at: First element in the flat tensor.
        buffer_at: First element in the buffer.
        length: Number of contiguous elements, on both sides.
        count: Number of repetitions, each `step` further in the tensor and `buffer_step` in the
            buffer.
        scale: Factor applied when copying back.
    """

    tensor: int
    at: int
    buffer_at: int
    length: int
    scale: float = 1.0
    count: int = 1
    step: int = 0
    buffer_step: int = 0

    def of_tensor(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the elements in their flat tensor, `[count, length]`."""
        return _strided(tensors[self.tensor], self.at, self.step, self)

    def of_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the elements in the buffer, `[count, length]`."""
        return _strided(buffer, self.buffer_at, self.buffer_step, self)


def _strided(flat: torch.Tensor, at: int, step: int, copy: Copy) -> torch.Tensor:
    return flat.as_strided((copy.count, copy.length), (step, 1), flat.storage_offset() + at)


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies into fewer operations: neighbours first, then copies at equal distances.

    Args:
        copies: Copies without repetitions.
    """
    return _equal_distances(_neighbours(copies))


def _neighbours(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies that start where the previous one ends, on both sides."""
    joined_copies: list[Copy] = []
    for copy in copies:
        last = joined_copies[-1] if joined_copies else None
        if last is not None and (copy.tensor, copy.scale, copy.at, copy.buffer_at) == (
            last.tensor,
            last.scale,
            last.at + last.length,
            last.buffer_at + last.length,
        ):
            joined_copies[-1] = replace(last, length=last.length + copy.length)
        else:
            joined_copies.append(copy)
    return joined_copies


def _equal_distances(copies: Iterable[Copy]) -> list[Copy]:
    """Join equally long copies that follow each other at equal distances, on both sides."""
    joined_copies: list[Copy] = []
    for copy in copies:
        last = joined_copies[-1] if joined_copies else None
        if last is not None and (copy.tensor, copy.scale, copy.length) == (
            last.tensor,
            last.scale,
            last.length,
        ):
            step = copy.at - last.at - (last.count - 1) * last.step
            buffer_step = copy.buffer_at - last.buffer_at - (last.count - 1) * last.buffer_step
            steady = (step, buffer_step) == (last.step, last.buffer_step)
            if steady or (last.count == 1 and min(step, buffer_step) >= copy.length):
                joined_copies[-1] = replace(
                    last, count=last.count + 1, step=step, buffer_step=buffer_step
                )
                continue
        joined_copies.append(copy)
    return joined_copies
