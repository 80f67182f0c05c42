"""Operator of both products with structured rows.

It is opaque to torch.compile, which needs only the shape of its result.

On CUDA it launches the Triton kernel of `monarch_triton`; on the CPU, for tests, it computes the
same by two batched products in float32. The products with the rows of `monarch.Factors`, and their
input gradient:

    two_products(x, right, left, None, tile)              [tokens, a * b] -> [tokens, m * a]
    two_products(grad, left.mT, right.mT, total, tile)    [tokens, m * a] -> total + [tokens, a * b]

The setting `performance.structured_products` decides where the operator is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

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
    """Return why the kernel cannot take these factors on their device.

    Args:
        right: `[a, m, b]`, see `monarch.Factors`.

    Returns:
        A clause for a message; None: it can.
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


@torch.library.custom_op("ora_pretrain::two_products", mutates_args=(), device_types="cpu")
def two_products(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    addend: torch.Tensor | None,
    tile: list[int],
) -> torch.Tensor:
    """Compute both products with structured rows, plus an addend, rounded once.

    out[t, r, m] = Σ_p second[r, m, p] Σ_k first[p, r, k] x[t, p, k] + addend[t, r, m]

    Args:
        x: `[tokens, p * k]`.
        first: `[p, r, k]`, in x's type, with any strides.
        second: `[r, m, p]`, in x's type, with any strides.
        addend: `[tokens, r * m]`, contiguous; None: nothing is added.
        tile: a `Tile`; the CPU has no use for it.

    Returns:
        `[tokens, r * m]`, contiguous, in x's type.
    """
    inputs = x.float().unflatten(1, (first.size(0), -1))
    between = torch.einsum("prk,tpk->rtp", first.float(), inputs)
    out = torch.bmm(between, second.float().mT).transpose(0, 1).flatten(1)
    if addend is not None:
        out = out + addend
    return out.to(x.dtype, memory_format=torch.contiguous_format)


@two_products.register_fake
def _(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    addend: torch.Tensor | None,
    tile: list[int],
) -> torch.Tensor:
    return x.new_empty(x.size(0), second.size(0) * second.size(1))


@two_products.register_kernel("cuda")
def launch(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    addend: torch.Tensor | None,
    tile: list[int],
) -> torch.Tensor:
    """Launch the kernel of `two_products`; tensors are on the CPU where Triton interprets.

    Args:
        x: `[tokens, p * k]`.
        first: `[p, r, k]`, in x's type, with any strides.
        second: `[r, m, p]`, in x's type, with any strides.
        addend: `[tokens, r * m]`, contiguous; None: nothing is added.
        tile: a `Tile`.

    Returns:
        `[tokens, r * m]`, contiguous, in x's type.
    """
    from triton import cdiv

    from megatron_patches.bank import monarch_triton

    num_r, rows, _ = second.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(len(x), num_r * rows)
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
        len(x),
        **kernel_constants(first.shape, rows, tokens, addend is not None),
        INTERPRETED=x.device.type == "cpu",
        num_warps=warps,
        num_stages=kernel_stages(x.element_size()),
    )
    return out


def kernel_constants(
    first: Sequence[int], rows: int, tokens: int, add: bool
) -> dict[str, int | bool]:
    """Return the constants for which the kernel is compiled.

    Args:
        first: shape of the first factor, (p, r, k).
        rows: rows m of a block of the result.
        tokens: tokens of a tile.
        add: the kernel has an addend.

    Returns:
        The kernel's arguments in capitals, without INTERPRETED.
    """
    num_p, num_r, width = first
    # The smallest tile of the tensor cores is 16; what is beyond the sizes is masked.
    padded = {
        "K_PADDED": max(16, _next_power_of_two(width)),
        "M_PADDED": max(16, _next_power_of_two(rows)),
    }
    sizes = {"P": num_p, "R": num_r, "K": width, "M": rows}
    return {**sizes, **padded, "ADD": add, "TOKENS": tokens, "GROUP": GROUP, "CHUNK": GROUP}


def kernel_stages(element_bytes: int) -> int:
    """Return 2, to load a step ahead, if the shared memory of an A100 has room for that, else 1."""
    return 1 if element_bytes > 2 else 2


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
