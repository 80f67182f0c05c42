"""Rotary positions of queries and keys, in three passes of memory.

The method is that of Su et al. 2021, arXiv:2104.09864.

megatron-core computes the cosine and sine of every angle anew in each layer, for queries and for
keys, and joins the rotated halves by copying. Here cosines and sines are computed once for all
layers of a model, and each rotation writes its result without another copy. The angles and the
pairing of components (i with i + head_dim / 2) are megatron-core's.
"""

from __future__ import annotations

from typing import Any

import torch


class RotaryAngles:
    """Table of cos and sin of position * base^(-2i / head_dim), for the longest sequence so far.

    The layers of a model share one table. A greater length, another device or data type replaces
    it.

    Args:
        head_dim: width of a head, an even number.
        base: base of the wavelengths, such as 10000.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        self.head_dim = head_dim
        self.base = base
        self._cosine = self._sine = torch.empty(0)

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads at positions 0, 1, … by the angles of each position.

        Args:
            heads: queries or keys, `[seq, batch, heads, head_dim]`.

        Returns:
            The same shape and data type.
        """
        length = heads.size(0)
        table = self._cosine
        if len(table) < length or table.device != heads.device or table.dtype != heads.dtype:
            with torch.inference_mode(False):  # a table from an evaluation must serve training too
                self._fill(length, heads)
        rotated: torch.Tensor = _Rotate.apply(heads, self._cosine[:length], self._sine[:length])
        return rotated

    def _fill(self, length: int, like: torch.Tensor) -> None:
        """Compute the table as megatron-core does: in float32, then cast to `like`'s data type."""
        exponents = (
            torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=like.device)
            / self.head_dim
        )
        positions = torch.arange(length, dtype=torch.float32, device=like.device)
        angles = torch.outer(positions, 1.0 / (self.base**exponents))[:, None, None, :]
        # The cosine for both halves, the sine for one: its sign differs between them.
        self._cosine = angles.cos().repeat(1, 1, 1, 2).to(like.dtype)
        self._sine = angles.sin().to(like.dtype)


class _Rotate(torch.autograd.Function):
    """Rotation of x by cos `[seq, 1, 1, head_dim]`, sin `[seq, 1, 1, head_dim / 2]`.

    Its gradient is the opposite rotation.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotated(heads, cosine, sine, sign=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        return _rotated(grad, cosine, sine, sign=-1), None, None


def _rotated(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, sign: int
) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    rotated = heads * cosine
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sine, value=-sign)
    rotated_second.addcmul_(first, sine, value=sign)
    return rotated
