"""Structured orthonormal rows: rows of a fixed orthogonal matrix behind random signs, W = S M D.

M is a [hidden_size, hidden_size] orthogonal matrix with a fast transform (Walsh-Hadamard or
DCT-II), D a diagonal of random signs, S a random choice of num_rows of M's rows, all distinct: W Wᵀ
= S M D D Mᵀ Sᵀ = I. D and S are drawn from the stream of the head (scope `head`) or of the layer's
role (scope `layer`: then no two heads share a row, and rows are orthonormal across heads too). With
one D and the same contiguous rows for queries and keys, W_qᵀ W_k would collapse into a fold of few
entries (Hadamard at 128 × 32: 512 of 16,384); with choices of their own it is as dense as chance
allows (about 14,100 there).

Everything here is made of comparisons, sign changes and elementwise float64 `+ - * /` and `sqrt`,
each correctly rounded by IEEE 754: the bits depend on no BLAS, mathematics library, CPU model or
thread count. The random numbers are the raw output of the counter-based generator, which no numpy
version may change.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megatron_patches.bank.exact import FloatArray

# cos and sin on [0, pi/4] by their Taylor polynomials up to x^22: the first term left out is below
# 2^-80.
TAYLOR_ORDER = 22


def is_power_of_two(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def hadamard_rows(stream: np.random.Generator, hidden_size: int, num_rows: int) -> FloatArray:
    """Draw rows of H D / sqrt(hidden_size), H the Walsh-Hadamard matrix of Sylvester.

    H[i, j] = (−1)^(number of ones in the binary i AND j); hidden_size is a power of two. All
    entries are ±1/sqrt(hidden_size): exact in bf16 (and any other binary format) when hidden_size
    is a power of 4, so that W Wᵀ = I without error there.

    Args:
        stream: random numbers of the head or layer.
    """
    signs, chosen = _draw(stream, hidden_size, num_rows)
    rows = np.ones((num_rows, 1))
    # H_2n = [[H_n, H_n], [H_n, -H_n]], bit by bit of the row.
    for bit in range(hidden_size.bit_length() - 1):
        flip = 1.0 - 2.0 * (chosen[:, None] >> bit & 1)
        rows = np.concatenate([rows, rows * flip], axis=1)
    return rows * (signs / math.sqrt(hidden_size))


def dct_rows(stream: np.random.Generator, hidden_size: int, num_rows: int) -> FloatArray:
    """Draw rows [num_rows, hidden_size] of C D, C the orthonormal DCT-II matrix.

    C[k, n] = sqrt(2/hidden_size) cos(pi (2n + 1) k / (2 hidden_size)), and row 0 divided by sqrt(2)
    (Ahmed, Natarajan and Rao, IEEE Trans. Computers C-23, 1974). |W Wᵀ − I| is a few 2^-53 ·
    sqrt(hidden_size).

    Args:
        stream: random numbers of the head or layer.
    """
    signs, chosen = _draw(stream, hidden_size, num_rows)
    # The argument is reduced in integers, modulo the period, before any rounding.
    odd = 2 * np.arange(hidden_size, dtype=np.int64) + 1
    rows = _cosines(hidden_size)[(chosen[:, None] * odd) % (4 * hidden_size)]
    scale = np.where(chosen == 0, math.sqrt(1 / hidden_size), math.sqrt(2 / hidden_size))
    return rows * scale[:, None] * signs


def _draw(
    stream: np.random.Generator, hidden_size: int, num_rows: int
) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Draw signs ±1 `[hidden_size]`, and the numbers `[num_rows]` of distinct rows in any order."""
    raw: npt.NDArray[np.uint64] = stream.bit_generator.random_raw(2 * hidden_size)  # type: ignore[attr-defined]
    signs = np.where(raw[:hidden_size] >> np.uint64(63), -1.0, 1.0)
    # The order of independent 64-bit keys is a uniform permutation (but for ties: 2^-64 a pair).
    chosen = np.argsort(raw[hidden_size:], kind="stable")[:num_rows]
    return signs, chosen.astype(np.int64)


def _cosines(hidden_size: int) -> FloatArray:
    """Return cos(pi m / (2 hidden_size)) for m = 0 ... 4 hidden_size − 1, each within 2 · 2^-53.

    Not by np.cos, whose last bits depend on the CPU's vector width and on the mathematics library.
    """
    unit = math.pi / (2 * hidden_size)
    half = hidden_size // 2  # up to pi/4 by the cosine, above by the sine of the complement
    angles = unit * np.arange(half + 1, dtype=np.float64)
    cosine = _taylor(angles, first=0)
    sine = _taylor(angles[: hidden_size - half], first=1)
    quarter = np.concatenate([cosine, sine[::-1]])  # m = 0 ... hidden_size; the last is exactly 0
    semicircle = np.concatenate([quarter, -quarter[-2::-1]])  # cos(pi − x) = −cos x
    return np.concatenate([semicircle, semicircle[-2:0:-1]])  # cos(2 pi − x) = cos x


def _taylor(x: FloatArray, first: int) -> FloatArray:
    """Evaluate cos x (first = 0) or sin x (first = 1) for x in [0, pi/4], by Horner's rule."""
    # From the highest power down, each step rounded once: a fixed order, hence fixed bits.
    square = x * x
    total = np.zeros_like(x)
    for power in reversed(range(first, TAYLOR_ORDER + 1, 2)):
        total = (-1) ** (power // 2) / math.factorial(power) + square * total
    return total * x if first else total
