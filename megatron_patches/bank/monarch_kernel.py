"""Operator of both products with structured rows, opaque to torch.compile, which needs only its shape.

On CUDA it launches the Triton kernel of `monarch_triton`; on the CPU, for tests, it computes the same by two
batched products in float32. The products with the rows of `monarch.Factors`, and their input gradient:

    two_products(x, right, left, None, [], 1, tile)              [tokens, a * b] -> [tokens, m * a]
    two_products(grad, left.mT, right.mT, total, [], 1, tile)    [tokens, m * a] -> total + [tokens, a * b]

The setting `performance.structured_products` decides where the operator is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_patches.bank.structured import is_power_of_two

LARGEST_BLOCK = 128
"""A program holds 16 blocks' results for all of its tokens in registers."""
GROUP = 16
"""Blocks of the result that a program makes, and of the input that it takes at a time."""


class Tile(NamedTuple):
    """Tile of a program of the kernel: changes the time, not the order of any sum."""

    tokens: int = 16
    warps: int = 8


TILES = (Tile(32, 8), Tile(16, 8), Tile(16, 4))
"""Tiles worth measuring."""


def why_not(right: torch.Tensor) -> str | None:
    """Return why the kernel cannot take these factors on their device, as the end of a sentence, or None.

    Args:
        right: `[a, m, b]` of `monarch.Factors`.
    """
    if right.device.type != "cuda":
        return "it is for CUDA, and this is the CPU"
    if max(right.size(0), right.size(2)) > LARGEST_BLOCK:
        return f"blocks of {right.size(0)} and {right.size(2)} are larger than {LARGEST_BLOCK}"
    try:
        import triton.language  # noqa: F401
    except ImportError:
        return "Triton, which torch with CUDA brings, is not installed"
    return None


def rotates(block: int, head_dim: int) -> bool:
    """Return whether the pass that makes heads out of blocks of so many rows can rotate them too."""
    half = head_dim // 2
    if half % block == 0:
        return is_power_of_two(half // block) and head_dim // block <= GROUP
    return block == head_dim and block >= GROUP and is_power_of_two(block)


@torch.library.custom_op("ora_pretrain::two_products", mutates_args=(), device_types="cpu")
def two_products(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    addend: torch.Tensor | None,
    angles: list[torch.Tensor],
    batch: int,
    tile: list[int],
    turn_back: bool = False,
) -> torch.Tensor:
    """Compute out[t, r, m] = Σ_p second[r, m, p] Σ_k first[p, r, k] x[t, p, k], plus addend, rounded once.

    Args:
        x: `[tokens, p * k]`.
        first, second: `[p, r, k]` and `[r, m, p]`, in x's type, with any strides.
        addend: `[tokens, r * m]`, contiguous, or None.
        angles: cosine and sine `[positions, head_dim / 2]` by which heads are rotated as in `rotary`, a
            token's position being its number // batch; or none. Only where `rotates` is true.
        tile: a `Tile`.
        turn_back: rotate x, the gradient by rotated heads, the other way first; else rotate the result.

    Returns:
        `[tokens, r * m]`, contiguous.
    """
    inputs = x.float()
    if turn_back and angles:
        inputs = _turned(inputs, angles, batch, sign=-1).to(x.dtype).float()
    between = torch.einsum("prk,tpk->rtp", first.float(), inputs.unflatten(1, (first.size(0), -1)))
    out = torch.bmm(between, second.float().mT).transpose(0, 1).flatten(1)
    if angles and not turn_back:
        out = _turned(out, angles, batch, sign=1)
    if addend is not None:
        out = out + addend
    return out.to(x.dtype, memory_format=torch.contiguous_format)


@two_products.register_fake
def _(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    addend: torch.Tensor | None,
    angles: list[torch.Tensor],
    batch: int,
    tile: list[int],
    turn_back: bool = False,
) -> torch.Tensor:
    return x.new_empty(x.size(0), second.size(0) * second.size(1))


@two_products.register_kernel("cuda")
def launch(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    addend: torch.Tensor | None,
    angles: list[torch.Tensor],
    batch: int,
    tile: list[int],
    turn_back: bool = False,
) -> torch.Tensor:
    """Launch the kernel of `two_products`; tensors are on the CPU where Triton interprets."""
    from triton import cdiv

    from megatron_patches.bank import monarch_triton

    num_r, rows, _ = second.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(len(x), num_r * rows)
    cosine, sine = angles or (x, x)
    half = sine.size(1) if angles else 0
    tokens, warps = tile
    monarch_triton.two_products[(cdiv(len(x), tokens) * cdiv(num_r, GROUP),)](
        x,
        x.stride(0),
        first,
        *first.stride(),
        second,
        *second.stride(),
        out if addend is None else addend,
        out,
        cosine,
        cosine.stride(0),
        sine,
        sine.stride(0),
        batch,
        len(x),
        **kernel_constants(first.shape, rows, tokens, half, turn_back, addend is not None),
        INTERPRETED=x.device.type == "cpu",
        num_warps=warps,
        num_stages=kernel_stages(x.element_size(), half, turn_back),
    )
    return out


def kernel_constants(
    first: Sequence[int], rows: int, tokens: int, half: int, turn_back: bool, add: bool
) -> dict[str, int | bool]:
    """Return the constants of a compilation: the kernel's arguments in capitals, without INTERPRETED.

    Args:
        first: shape of `first`.
        rows: rows of a block of the result.
        half: half of head_dim where heads are rotated, else 0.
    """
    num_p, num_r, width = first
    # The smallest tile of the tensor cores is 16; what is beyond the sizes is masked.
    padded = {"K_PADDED": max(16, _next_power_of_two(width)), "M_PADDED": max(16, _next_power_of_two(rows))}
    turns = {"HALF_IN": half if turn_back else 0, "HALF_OUT": 0 if turn_back else half, "ADD": add}
    sizes = {"P": num_p, "R": num_r, "K": width, "M": rows}
    return {**sizes, **padded, **turns, "TOKENS": tokens, "GROUP": GROUP, "CHUNK": GROUP}


def kernel_stages(element_bytes: int, half: int, turn_back: bool) -> int:
    """Return 2, to load a step ahead, if the shared memory of an A100 has room for that, else 1."""
    return 1 if element_bytes > 2 or (half and turn_back) else 2


def _turned(heads: torch.Tensor, angles: list[torch.Tensor], batch: int, sign: int) -> torch.Tensor:
    """Rotate each head of `[tokens, heads * head_dim]`, float32, by the angles of its position."""
    cosine, sine = (angle.float().repeat_interleave(batch, dim=0)[: len(heads), None] for angle in angles)
    first, second = heads.unflatten(1, (-1, 2 * sine.size(-1))).chunk(2, dim=-1)
    turned = (first * cosine - sign * second * sine, second * cosine + sign * first * sine)
    return torch.cat(turned, dim=-1).flatten(1)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
