"""Hadamard and DCT rows: what they are, how exact, and that heads do not collapse."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from megatron_patches.bank.exact import FloatArray, orthonormality_error
from megatron_patches.bank.orthonormal import rows_of_heads
from megatron_patches.bank.structured import _cosines
from tests.megatron_patches.bank.recipes import head_rows, recipe_of, shard

STRUCTURED = ("hadamard", "dct")


def full_matrix(construction: str, size: int) -> FloatArray:
    """The matrix the rows come from, by its textbook definition."""
    row, column = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    if construction == "hadamard":
        ones = np.array([[bin(i & j).count("1") for j in range(size)] for i in range(size)])
        return (-1.0) ** ones / math.sqrt(size)
    cosines = np.cos(np.pi * (2 * column + 1) * row / (2 * size))
    return cosines * np.where(row == 0, math.sqrt(1 / size), math.sqrt(2 / size))


def signs_and_rows(rows: FloatArray, matrix: FloatArray) -> tuple[FloatArray, list[int]]:
    """The D and the row numbers with rows = S M D, found by comparing absolute values and signs."""
    for signs in (np.sign(rows[0] * row) for row in matrix):  # one of them is ±D
        overlap = rows @ (matrix * signs).T
        if np.allclose(np.abs(overlap).max(axis=1), 1):
            return signs, np.abs(overlap).argmax(axis=1).tolist()
    raise AssertionError("these are no rows of the matrix behind one set of signs")


@pytest.mark.parametrize("construction", STRUCTURED)
def test_rows_are_rows_of_the_textbook_matrix_behind_random_signs(construction: str) -> None:
    matrix = full_matrix(construction, 64)
    choices = {}
    for head in range(4):
        rows = head_rows(recipe_of(64, 16, 4, construction=construction), 2, "key", head)
        signs, chosen = signs_and_rows(rows, matrix)
        assert len(set(chosen)) == 16
        assert 16 <= (signs > 0).sum() <= 48
        choices[head] = signs.tobytes(), tuple(chosen)
    # Signs and rows of each head are its own.
    assert len({signs for signs, _ in choices.values()}) == 4
    assert len({rows for _, rows in choices.values()}) == 4


@pytest.mark.parametrize("construction", STRUCTURED)
def test_layer_scope_gives_no_row_to_two_heads(construction: str) -> None:
    rows = rows_of_heads(
        recipe_of(64, 16, 4, scope="layer", construction=construction), 0, "query", range(4)
    )
    _, chosen = signs_and_rows(rows, full_matrix(construction, 64))
    assert sorted(chosen) == list(range(64))
    assert chosen != sorted(chosen)


@pytest.mark.parametrize("construction", STRUCTURED)
def test_every_row_and_sign_is_drawn_equally_often(construction: str) -> None:
    recipe = recipe_of(16, 4, 2000, construction=construction)
    heads = rows_of_heads(recipe, 0, "query", range(2000)).reshape(2000, 4, 16)
    # Given the size of one entry's sign, E[W] = 0; each row of M is in a head with probability
    # 4/16, so E[WᵀW] = I · 4/16 whatever M is.
    assert np.abs(heads.mean(axis=0)).max() < 5 / math.sqrt(16 * 2000)
    gram = np.einsum("hrc,hrd->cd", heads, heads) / 2000
    assert np.abs(gram - np.eye(16) / 4).max() < 0.02
    matrix = full_matrix(construction, 16)
    chosen = np.array([signs_and_rows(head, matrix)[1] for head in heads])
    # Behind its signs a choice of Hadamard's rows is known but for one XOR; pairs are free of it.
    pairs = np.bincount((chosen[:, :, None] ^ chosen[:, None]).ravel(), minlength=16)[1:]
    assert np.abs(pairs - 1600).max() < 250
    if construction == "dct":
        assert np.abs(np.bincount(chosen.ravel(), minlength=16) - 500).max() < 100


@pytest.mark.parametrize("hidden_size", [16, 64, 256, 1024, 4096])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_hadamard_has_no_error_at_all_in_bf16_at_powers_of_four(
    hidden_size: int, scope: str
) -> None:
    recipe = recipe_of(hidden_size, 8, 2, scope=scope, construction="hadamard")
    rounded = shard(recipe, 0, "query", torch.bfloat16).double()
    assert torch.equal(rounded, shard(recipe, 0, "query", torch.float64))
    assert orthonormality_error(rounded[:8].numpy()) == 0


@pytest.mark.parametrize(
    ("construction", "hidden_size", "dtype", "tolerance"),
    [
        ("hadamard", 2048, torch.bfloat16, 2.2e-4),
        ("hadamard", 2048, torch.float32, 5e-8),
        ("dct", 2048, torch.bfloat16, 2e-3),
        ("dct", 768, torch.bfloat16, 2e-3),
        ("dct", 768, torch.float32, 1e-6),
    ],
)
def test_error_of_the_cast_elsewhere(
    construction: str, hidden_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    rows = shard(recipe_of(hidden_size, 64, construction=construction), 0, "query", dtype)
    assert 0 < orthonormality_error(rows.double().numpy()) <= tolerance


@pytest.mark.parametrize("hidden_size", [1, 2, 3, 8, 100, 768])
def test_cosines_are_good_to_the_last_digits(hidden_size: int) -> None:
    with localcontext() as context:
        context.prec = 40
        pi = Decimal("3.14159265358979323846264338327950288419716939937510")
        for m, cosine in enumerate(
            _cosines(hidden_size)[: 4 * hidden_size : max(1, hidden_size // 50)]
        ):
            x = pi * (m * max(1, hidden_size // 50)) / (2 * hidden_size)
            term = total = Decimal(1)
            for k in range(1, 40):
                term *= -x * x / ((2 * k - 1) * 2 * k)
                total += term
            assert abs(total - Decimal(float(cosine))) <= Decimal(2) * Decimal(2) ** -53
    assert len(_cosines(hidden_size)) == 4 * hidden_size


def spread(query: FloatArray, key: FloatArray) -> float:
    """(Σ w²)² / Σ w⁴ of W_qᵀ W_k over its n entries.

    1 if all are of one size, k/n if only k count.
    """
    square = (query.T @ key) ** 2
    return float(square.sum() ** 2 / (square**2).sum() / square.size)


@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize("construction", STRUCTURED)
def test_queries_and_keys_do_not_collapse(construction: str, scope: str) -> None:
    """W_qᵀ W_k stays dense.

    One D and the same contiguous rows for both roles would leave 512 of 16,384.
    """
    recipe = recipe_of(128, 32, 4, scope=scope, construction=construction)
    for head in range(4):
        query = head_rows(recipe, 0, "query", head)
        key = head_rows(recipe, 0, "key", head)
        assert spread(query, key) > 0.25
        if construction == "hadamard":
            # A sum of 32 signs is 0 with probability C(32, 16) / 2^32 = 0.14: 14,090 expected.
            assert 13_700 <= np.count_nonzero(np.abs(query.T @ key) > 1e-12) <= 14_500
    matrix = full_matrix(construction, 128)[32:64]
    signs = np.random.default_rng(0).choice([-1.0, 1.0], 128)
    assert spread(matrix * signs, matrix * signs) < 0.1
    if construction == "hadamard":
        collapsed = (matrix * signs).T @ (matrix * signs)
        assert np.count_nonzero(np.abs(collapsed) > 1e-12) == 512
