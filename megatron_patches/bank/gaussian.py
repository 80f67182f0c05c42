"""Gaussian matrices, and orthonormal rows made of them by LAPACK.

The last bits of these rows depend on the LAPACK in use, those of `qr` (see `exact`) do not.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_patches.bank.exact import FloatArray

# Normal deviates are rounded to multiples of 1/GRID: entries of at most 19 bits, whose Gram matrix
# is exact (one slice in `exact`) up to hidden_size 2^15.
GRID = 2.0**16


def normal(stream: np.random.Generator, hidden_size: int, columns: int) -> FloatArray:
    """Draw A [hidden_size, columns] of N(0, 1), rounded to multiples of 1/GRID.

    The rounding moves an entry by at most 8e-6, adds 2e-11 to the variance and cannot be seen in
    any statistic of a model. It makes Gram matrices exact, and hides the last-bit differences
    between mathematics libraries that numpy's generator can show in the 0.03 % of entries beyond
    3.65 (those take a logarithm).
    """
    return np.rint(stream.standard_normal((hidden_size, columns)) * GRID) / GRID


def svd_rows(stream: np.random.Generator, hidden_size: int, num_rows: int) -> FloatArray:
    """Draw (U Vᵀ)ᵀ of A = U S Vᵀ, the orthonormal matrix nearest to A.

    Haar. Last bits depend on LAPACK.
    """
    left, _, right = np.linalg.svd(normal(stream, hidden_size, num_rows), full_matrices=False)
    return (left @ right).T


def householder_rows(stream: np.random.Generator, hidden_size: int, num_rows: int) -> FloatArray:
    """Draw the first columns of a product of reflectors, signs corrected.

    Haar (Stewart, SINUM 17, 1980).

    Reflector j sends a Gaussian vector in the last hidden_size − j dimensions to the axis; the sign
    of column j makes its entry of R positive. The last bits depend on the BLAS in use.
    """
    gaussian = normal(stream, hidden_size, num_rows)
    columns = np.eye(hidden_size, num_rows)
    for j in reversed(range(num_rows)):
        vector = gaussian[j:, j].copy()
        sign = math.copysign(1.0, vector[0] + 0.0)  # + 0.0: a negative zero counts as +
        vector[0] += sign * float(np.linalg.norm(vector))
        length = float(vector @ vector)
        if length > 0:  # a reflector of nothing is the identity
            columns[j:, j:] -= np.outer(vector, (2 / length) * (vector @ columns[j:, j:]))
            columns[:, j] *= -sign
    return columns.T


def cayley_rows(stream: np.random.Generator, hidden_size: int, num_rows: int) -> FloatArray:
    """Draw the first columns of (I − S)⁻¹(I + S), S skew, entries N(0, 2/hidden_size).

    O(hidden_size³).

    Not Haar. With this variance the mean diagonal of the result tends to 0, which is Haar's: the
    eigenvalues iλ of S fill a semicircle of variance 2, over which (1 − λ²)/(1 + λ²) has mean 0.
    The last bits depend on the LAPACK in use.
    """
    lower = np.tril(normal(stream, hidden_size, hidden_size), -1) * math.sqrt(2 / hidden_size)
    skew = lower - lower.T
    identity = np.eye(hidden_size)
    return np.linalg.solve(identity - skew, (identity + skew)[:, :num_rows]).T
