"""Linear algebra in float64 whose *bits* depend on no CPU model, BLAS or thread count.

A BLAS chooses its kernels (vector width, fused multiply-add, order of summation) by the CPU it
finds, so the last bits of `a @ b` or of a LAPACK factorisation differ between CPU models. Two facts
get around that:

* Elementwise numpy `+ - * / sqrt` are each correctly rounded (IEEE 754) and never fused across
  calls.
* A matrix product of integers is exact, hence the same in any order and with any fusing, while
  every partial sum stays within 2^53.

So a real product is made of exact ones: cut both factors into slices of few bits, multiply the
slices with the ordinary fast BLAS, and add the results elementwise in a fixed order (Ozaki, Ogita,
Oishi and Rump, "Error-free transformations of matrix multiplication by using fast routines of
matrix multiplication", Numer. Algorithms 59, 2012).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MANTISSA_BITS = 53
# Up to this size the elementwise elimination is quicker than recursing into matrix products.
ELIMINATION_SIZE = 64
# Above this share (see `orthonormalize_rows`) one pass leaves an error of a few ulp; below, one
# more is made.
GOOD_PIVOT_SHARE = 0.5
# Below this share the first pass could lose so many digits that the second one no longer repairs
# it.
LEAST_PIVOT_SHARE = 2.0**-24


def reproducible_matmul(a: FloatArray, b: FloatArray) -> FloatArray:
    """Multiply two matrices with the same bits on every IEEE machine.

    Args:
        a: [m, k], float64, finite.
        b: [k, n], float64, finite; k at most 2^25.

    Returns:
        [m, n]; the error of entry (i, j) is a few 2^-53 · k · max|a[i, :]| · max|b[:, j]|, as for
        an ordinary product. Integer factors (or factors on a common power-of-two grid) that fit one
        slice are multiplied exactly, in one BLAS call.
    """
    # k products of two slices are at most k · 2^(2 · bits) <= 2^53: every partial sum is an exact
    # integer.
    bits = (MANTISSA_BITS - (a.shape[1] - 1).bit_length()) // 2
    count = -(-(MANTISSA_BITS + 1) // bits)
    a_slices = _slices(a, bits, count, axis=1)
    b_slices = _slices(b, bits, count, axis=0)
    # Products of later slices lie below the last digit of the result.
    pairs = [(i, j) for i in range(len(a_slices)) for j in range(len(b_slices)) if i + j < count]
    # The smallest terms first. That the order is fixed is what matters.
    pairs.sort(key=lambda pair: (-pair[0] - pair[1], pair))
    total = a_slices[pairs[0][0]] @ b_slices[pairs[0][1]]
    for i, j in pairs[1:]:
        total += a_slices[i] @ b_slices[j]
    return total


def _slices(x: FloatArray, bits: int, count: int, axis: int) -> list[FloatArray]:
    """Cut `x` into at most `count` matrices that add up to it, up to digits far below its last.

    Each matrix holds integers of `bits` bits, times one power of two per row (axis 1) or column
    (axis 0).
    """
    largest = np.abs(x).max(axis=axis, keepdims=True)
    exponent = np.frexp(largest)[1]
    slices = []
    for number in range(1, count + 1):
        # Adding and taking away 1.5 · 2^52 units rounds to whole units, exactly.
        shift = np.ldexp(1.5, MANTISSA_BITS - 1 + exponent - bits * number)
        piece = (x + shift) - shift
        slices.append(piece)
        x = x - piece
        if not x.any():
            break
    return slices


def inverse_cholesky(gram: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Invert the Cholesky factor L of a matrix, reproducibly: gram = L Lᵀ, diagonal positive.

    Args:
        gram: symmetric `[n, n]`, float64.

    Returns:
        L⁻¹ `[n, n]`, lower triangular, and the pivots diag(L)² `[n]`. For a matrix that is not
        numerically positive definite some pivot is not positive (or NaN) and L⁻¹ is meaningless.
    """
    size = len(gram)
    if size <= ELIMINATION_SIZE:
        return _eliminate(gram)
    # Blockwise, because matrix products are many times faster than the elementwise elimination.
    half = size // 2
    first, first_pivots = inverse_cholesky(gram[:half, :half])
    upper = reproducible_matmul(first, gram[:half, half:])  # the off-diagonal block of Lᵀ
    schur = gram[half:, half:] - reproducible_matmul(upper.T, upper)
    last, last_pivots = inverse_cholesky(schur)
    inverse = np.zeros_like(gram)
    inverse[:half, :half] = first
    inverse[half:, half:] = last
    inverse[half:, :half] = -reproducible_matmul(last, reproducible_matmul(upper.T, first))
    return inverse, np.concatenate([first_pivots, last_pivots])


def _eliminate(gram: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute `inverse_cholesky` by Gaussian elimination of [gram | I], elementwise only."""
    size = len(gram)
    work = np.concatenate([gram, np.eye(size)], axis=1)
    for column in range(size - 1):
        pivot_row = work[column, column + 1 : size + column + 1]
        factors = work[column + 1 :, column] / work[column, column]
        work[column + 1 :, column + 1 : size + column + 1] -= factors[:, None] * pivot_row
    pivots = work.diagonal().copy()
    return work[:, size:] / np.sqrt(pivots)[:, None], pivots


def orthonormalize_rows(rows: FloatArray) -> FloatArray | None:
    """Compute Qᵀ of the thin QR decomposition rowsᵀ = Q R with diag(R) > 0, reproducibly.

    R is the transposed Cholesky factor of the Gram matrix, so Qᵀ = L⁻¹ · rows. That loses about as
    many digits as the Gram matrix is ill conditioned, so the result is treated the same way again
    until its Gram matrix is well conditioned (CholeskyQR2: Yamamoto, Nakatsukasa, Yanagisawa and
    Fukaya, ETNA 44, 2015). The smallest pivot share measures the conditioning: pivot j as a share
    of the squared length of row j is the part of that row outside the span of the earlier rows.

    Args:
        rows: `[m, n]`, float64, m at most n.

    Returns:
        `[m, n]` with orthonormal rows; None: `rows` are too close to dependent.
    """
    while True:
        gram = reproducible_matmul(rows, rows.T)
        # A factorisation that fails shows as a share that is not large enough, or NaN.
        with np.errstate(all="ignore"):
            inverse, pivots = inverse_cholesky(gram)
            share = float((pivots / gram.diagonal()).min())
        if not share >= LEAST_PIVOT_SHARE:
            return None
        rows = reproducible_matmul(inverse, rows)
        if share >= GOOD_PIVOT_SHARE:
            return rows


def orthonormality_error(rows: FloatArray) -> float:
    """Return the largest |W Wᵀ − I| of rows W [m, n], the same number on every machine."""
    return float(np.abs(reproducible_matmul(rows, rows.T) - np.eye(len(rows))).max())
