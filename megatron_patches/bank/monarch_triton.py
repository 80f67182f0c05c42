"""Triton kernel of `monarch_kernel`: both products, the intermediate result on chip.

    out[t, r, m] = Σ_p second[r, m, p] between[t, r, p]
    between[t, r, p] = Σ_k first[p, r, k] x[t, p, k]

is `monarch.project` with first = right and second = left, where p is a piece, k a place in it, r a
block and m a row of the block. The same kernel computes the input gradient with first = left and
second = right, transposed by their strides, where p is a block and r a piece. Queries and keys are
blocks of one `Factors`, so one pass makes both.

Between the two products p and r change places: the first gives all r of one p, the second needs all
p of one r. Triton cannot address what is in registers. So a program holds GROUP of the r for TOKENS
tokens, and takes the p by CHUNK: the program makes the cube [CHUNK, TOKENS, GROUP] of `between` as
one batched product (p is the batch), permutes it through shared memory, and adds its batched
product with `second` (r is the batch) to what it holds. Nothing is computed twice, `between` never
leaves the chip, and its cube does not grow with the hidden size. The price: every GROUP of the r
reads x again. Programs of the same tokens are neighbours, so x is to come from DRAM once and from
L2 after that, like the factors, which are read once for every TOKENS tokens. (All of x in
registers, or one r at a time, would need too many of them, or starve the tensor cores.)

In bf16 `between` is split into high + low, two numbers of bf16 that have 16 bits of it: rounded to
one, it would be off by more than the one rounding of the result. fp32 is multiplied as fp32, not as
TF32, which no tensor core does: it is slow on purpose.

INTERPRETED works round Triton's interpreter, which multiplies the bits of bf16 as integers and cuts
off where it should round. Only what Triton 3.5 (of torch 2.9) and 3.7 (of torch 2.13) have in
common is used.
"""

# mypy: allow-untyped-defs
# Triton looks up every annotation, and knows no other than constexpr.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def two_products(  # noqa: D417, its arguments are told in groups
    x,
    x_row,
    first,
    first_p,
    first_r,
    first_k,
    second,
    second_r,
    second_m,
    second_p,
    addend,
    out,
    num_tokens,
    P: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    K_PADDED: tl.constexpr,
    M_PADDED: tl.constexpr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute out `[num_tokens, R * M]` of x `[num_tokens, P * K]`.

    A program: TOKENS tokens, GROUP of the r.

    Args:
        x, x_row: input, and its stride; its last dimension is contiguous.
        first, first_p, first_r, first_k: first factor [p, r, k] and its strides.
        second, second_r, second_m, second_p: second factor [r, m, p] and its strides.
        addend, out: of one shape, contiguous.
        num_tokens: rows of x.
        P, R, K, M: sizes of the factors.
        K_PADDED, M_PADDED: the next powers of two that `tl.dot` takes.
        ADD: add `addend`.
        TOKENS, GROUP, CHUNK: tokens and r of a program, and p of one of its rounds.
        INTERPRETED: Triton's interpreter runs it.
    """
    groups = tl.cdiv(R, GROUP)
    r = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    t = tl.program_id(0) // groups * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, K_PADDED)
    m = tl.arange(0, M_PADDED)
    total = tl.zeros((GROUP, TOKENS, M_PADDED), tl.float32)
    for start in range(0, P, CHUNK):
        p = start + tl.arange(0, CHUNK)
        here = (p[:, None, None] < P) & (t[None, :, None] < num_tokens) & (k[None, None, :] < K)
        row = x + t[None, :, None].to(tl.int64) * x_row
        inputs = tl.load(  # [p, t, k]
            row + p[:, None, None] * K + k[None, None, :], mask=here, other=0.0
        )
        left = tl.load(  # [p, k, r]
            first
            + p[:, None, None] * first_p
            + k[None, :, None] * first_k
            + r[None, None, :] * first_r,
            mask=(p[:, None, None] < P) & (k[None, :, None] < K) & (r[None, None, :] < R),
            other=0.0,
        )
        right = tl.load(  # [r, p, m]
            second
            + r[:, None, None] * second_r
            + p[None, :, None] * second_p
            + m[None, None, :] * second_m,
            mask=(r[:, None, None] < R) & (p[None, :, None] < P) & (m[None, None, :] < M),
            other=0.0,
        )
        if INTERPRETED:
            inputs = inputs.to(tl.float32)
            left = left.to(tl.float32)
        between = tl.permute(tl.dot(inputs, left, input_precision="ieee"), (2, 1, 0))  # [r, t, p]
        if second.dtype.element_ty == tl.float32:
            total = tl.dot(between, right, total, input_precision="ieee")
        else:
            high = _rounded(between, second.dtype.element_ty, INTERPRETED)
            low = _rounded(between - high.to(tl.float32), second.dtype.element_ty, INTERPRETED)
            if INTERPRETED:
                high = high.to(tl.float32)
                low = low.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(high, right, total)
            total = tl.dot(low, right, total)
    places = t[None, :, None].to(tl.int64) * (R * M) + r[:, None, None] * M + m[None, None, :]
    wanted = (t[None, :, None] < num_tokens) & (r[:, None, None] < R) & (m[None, None, :] < M)
    if ADD:
        total += tl.load(addend + places, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + places, _rounded(total, out.dtype.element_ty, INTERPRETED), mask=wanted)


@triton.jit
def _rounded(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round float32 to the nearest number of `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        values = bits.to(tl.float32, bitcast=True)
    return values.to(dtype)
