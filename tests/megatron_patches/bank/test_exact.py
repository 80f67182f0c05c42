"""Products and factorisations whose bits do not depend on order, BLAS kernel or threads."""

import hashlib
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from megatron_patches.bank.exact import (
    inverse_cholesky,
    orthonormality_error,
    orthonormalize_rows,
    reproducible_matmul,
)

PRINT_BITS = """
import hashlib
import numpy
from megatron_patches.bank.exact import orthonormalize_rows
from megatron_patches.bank.orthonormal import BankRecipe, rows_of_heads
sha256 = hashlib.sha256()
for hidden_size, head_dim in [(768, 64), (64, 64), (200, 160), (1024, 1)]:
    sha256.update(rows_of_heads(BankRecipe(1, hidden_size, head_dim, 1, 1), 0, "query", [0]))
    dct = BankRecipe(1, hidden_size, head_dim, 1, 1, construction="dct")
    sha256.update(rows_of_heads(dct, 0, "query", [0]))
    # rows_of_heads allows one thread only; this does not
    normal = numpy.random.default_rng(head_dim).standard_normal((head_dim, hidden_size))
    sha256.update(orthonormalize_rows(normal))
hadamard = BankRecipe(1, 2048, 64, 1, 1, construction="hadamard")
sha256.update(rows_of_heads(hadamard, 0, "query", [0]))
print(sha256.hexdigest())
"""
GOLDEN = "e9989caf1707497cbf88a098d4cb219284714e6da9e6075ee5e334dee71a0b7e"
PRINT_DISPATCHED = """
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
print(" ".join(name for name in __cpu_dispatch__ if __cpu_features__[name]))
"""


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 64, 6), (4, 1000, 3)])
def test_matmul_is_as_accurate_as_float64_allows(
    generator: np.random.Generator, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    a = generator.standard_normal((m, k))
    b = generator.standard_normal((k, n))
    c = reproducible_matmul(a, b)
    for i in range(m):
        for j in range(n):
            truth = sum(Fraction(x) * Fraction(y) for x, y in zip(a[i], b[:, j], strict=True))
            bound = 4 * 2.0**-53 * (1 + k * np.abs(a[i]).max() * np.abs(b[:, j]).max())
            assert abs(float(Fraction(c[i, j]) - truth)) <= bound


def test_the_bits_of_a_product_have_not_changed() -> None:
    """They are those of the frozen rows; a size at each change of the slices' width."""
    sha256 = hashlib.sha256()
    for k in (1, 2, 3, 5, 8, 9, 33, 128, 129, 513):
        a, b = (
            np.random.Generator(np.random.Philox(key)).random((k, 3)) - 0.5 for key in (k, 1000 + k)
        )
        sha256.update(reproducible_matmul(a.T.copy(), b))
    assert sha256.hexdigest() == GOLDEN


def test_matmul_of_integers_is_exact(generator: np.random.Generator) -> None:
    a = generator.integers(-(2**19), 2**19, (8, 4096)).astype(np.float64)
    b = generator.integers(-(2**19), 2**19, (4096, 8)).astype(np.float64)
    truth = a.astype(np.int64) @ b.astype(np.int64)
    assert (reproducible_matmul(a, b).astype(np.int64) == truth).all()


def test_matmul_does_not_depend_on_the_order_of_summation(generator: np.random.Generator) -> None:
    a = generator.standard_normal((64, 777))
    b = generator.standard_normal((777, 64))
    order = generator.permutation(777)
    assert (a @ b != a[:, order] @ b[order]).any()  # an ordinary product does
    assert (reproducible_matmul(a, b) == reproducible_matmul(a[:, order], b[order])).all()


def test_matmul_with_rows_of_zeros_and_of_very_different_sizes(
    generator: np.random.Generator,
) -> None:
    a = generator.standard_normal((4, 50)) * np.array([[0.0], [1.0], [1e100], [1e-100]])
    b = generator.standard_normal((50, 3))
    assert np.allclose(reproducible_matmul(a, b), a @ b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 200])
def test_inverse_cholesky(generator: np.random.Generator, size: int) -> None:
    rows = generator.standard_normal((size, 4 * size))
    gram = rows @ rows.T
    inverse, pivots = inverse_cholesky(gram)
    factor = np.linalg.cholesky(gram)
    assert (np.triu(inverse, 1) == 0).all()
    assert np.abs(inverse @ factor - np.eye(size)).max() < 1e-13 * size
    assert np.allclose(pivots, factor.diagonal() ** 2, rtol=1e-12)


def test_nearly_dependent_rows_are_orthonormalised_or_refused(
    generator: np.random.Generator,
) -> None:
    rows = generator.standard_normal((100, 400))
    rows[70] = rows[3] + 1e-3 * rows[70]  # one pass alone leaves an error of about 1e-10
    orthonormal = orthonormalize_rows(rows)
    assert orthonormal is not None
    assert orthonormality_error(orthonormal) < 1e-14
    rows[70] = rows[3]
    assert orthonormalize_rows(rows) is None
    assert orthonormalize_rows(np.zeros((1, 5))) is None


@pytest.mark.distributed
def test_the_bits_do_not_depend_on_blas_kernel_vector_width_or_threads() -> None:
    """OPENBLAS_CORETYPE makes OpenBLAS take another CPU's kernels (no-op for another BLAS).

    NPY_DISABLE_CPU_FEATURES makes numpy itself take its plainest loops.
    """
    seen = {
        _output(PRINT_BITS, {"NPY_DISABLE_CPU_FEATURES": _output(PRINT_DISPATCHED, {}).strip()})
    }
    for core in ("", "Haswell", "SkylakeX", "Sandybridge", "Nehalem"):
        for threads in ("1", "4"):
            settings = {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads} | (
                {"OPENBLAS_CORETYPE": core} if core not in ("", *_unavailable()) else {}
            )
            seen.add(_output(PRINT_BITS, settings))
    assert len(seen) == 1


def _output(program: str, settings: dict[str, str]) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=True
    ).stdout


def _unavailable() -> tuple[str, ...]:
    """Kernel sets that this CPU cannot run."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = {word for line in lines if line.startswith("flags") for word in line.split()}
    except OSError:
        return ("Haswell", "SkylakeX", "Sandybridge", "Nehalem")
    needs = {
        "Haswell": {"avx2", "fma"},
        "SkylakeX": {"avx512f", "avx512dq"},
        "Sandybridge": {"avx"},
        "Nehalem": {"sse4_2"},
    }
    return tuple(core for core, needed in needs.items() if not needed <= flags)
