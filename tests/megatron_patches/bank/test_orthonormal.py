"""The frozen rows: orthonormal, Haar, a function of (seed, layer, role, head) alone."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from megatron_patches.bank.exact import orthonormality_error
from megatron_patches.bank.orthonormal import (
    CONSTRUCTIONS,
    FACTORED,
    ROLES,
    BankRecipe,
    rows_of_heads,
)
from megatron_patches.errors import MethodError
from tests.megatron_patches.bank.recipes import head_rows, recipe_of, sha256

SHAPES = [(1, 1), (2, 1), (64, 64), (65, 33), (256, 256), (512, 1), (768, 64), (1024, 64)]
# Of two heads of seed 1234. A change here means that every existing run would lose its frozen bank.
GOLDEN_HEAD = "501c476261f91cb5a6e8766b407c3ea2cab010f96cbd91e99ab88a03d1c19b70"
GOLDEN_LAYER = "00e7534eba10578635554f354c5b8387755158dc9df02674fafe8e2a2af92771"
GOLDEN_HADAMARD = "44b0c41c912229a422a8a3a546d1c42700fd63b0eb2da65026827abe0992e6ba"
GOLDEN_DCT = "0f2695b9d2f9ab4fb914a4997b3fe6bf510aa33142fe770bc41faddcbc8e9a66"


# Those are in test_factors.py.
BY_HEAD = tuple(name for name in CONSTRUCTIONS if name not in FACTORED)
POSSIBLE = [
    (construction, *shape)
    for construction in BY_HEAD
    for shape in SHAPES
    if construction != "hadamard" or shape[0].bit_count() == 1  # a power of two
]


@pytest.mark.parametrize(("construction", "hidden_size", "head_dim"), POSSIBLE)
def test_rows_are_orthonormal(construction: str, hidden_size: int, head_dim: int) -> None:
    rows = head_rows(recipe_of(hidden_size, head_dim, construction=construction), 0, "query", 0)
    assert rows.shape == (head_dim, hidden_size)
    assert rows.dtype == np.float64
    assert orthonormality_error(rows) <= 1e-12


def test_qr_is_good_to_the_last_digits_at_a_wide_model() -> None:
    assert orthonormality_error(head_rows(recipe_of(4096, 128), 0, "key", 0)) <= 1e-14


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
def test_rows_stay_orthonormal_when_cast(dtype: torch.dtype, tolerance: float) -> None:
    rows = torch.from_numpy(head_rows(recipe_of(768, 64), 0, "query", 0)).to(dtype)
    assert 0 < orthonormality_error(rows.double().numpy()) <= tolerance


def test_transpose_is_an_isometry_and_the_rows_are_not() -> None:
    rows = head_rows(recipe_of(768, 64), 0, "query", 0)
    generator = np.random.default_rng(0)
    gradient = generator.standard_normal(64)
    x = generator.standard_normal((500, 768))
    assert np.linalg.norm(rows.T @ gradient) == pytest.approx(np.linalg.norm(gradient), rel=1e-12)
    ratio = np.linalg.norm(x @ rows.T, axis=1) / np.linalg.norm(x, axis=1)
    assert ratio.max() < 1
    assert ratio.mean() == pytest.approx((64 / 768) ** 0.5, abs=0.01)


@pytest.mark.parametrize(("hidden_size", "head_dim"), [(768, 64), (200, 100), (64, 64)])
def test_qr_is_the_textbook_decomposition_with_the_sign_fix(
    hidden_size: int, head_dim: int
) -> None:
    normal = head_rows(
        recipe_of(hidden_size, head_dim, init="gaussian", gaussian_std=1.0), 2, "key", 0
    ).T
    columns, upper = np.linalg.qr(normal)
    textbook = (columns * np.sign(upper.diagonal())).T
    rows = head_rows(recipe_of(hidden_size, head_dim), 2, "key", 0)
    assert np.abs(rows - textbook).max() <= 1e-12


@pytest.mark.parametrize("construction", ["qr", "svd", "householder"])
def test_square_draws_have_the_trace_moments_of_haar(construction: str) -> None:
    recipe = recipe_of(8, 8, heads=1000, construction=construction)
    draws = rows_of_heads(recipe, 0, "query", range(1000)).reshape(-1, 8, 8)
    traces = np.trace(draws, axis1=1, axis2=2)
    assert np.abs(np.einsum("nii->ni", draws).mean(axis=0)).max() < 0.04
    assert traces.mean() == pytest.approx(0, abs=0.1)
    assert (traces**2).mean() == pytest.approx(1, abs=0.15)
    assert (traces**4).mean() == pytest.approx(3, abs=1)


def test_without_the_sign_fix_the_same_draws_are_not_haar() -> None:
    normal = rows_of_heads(recipe_of(8, 8, heads=1000, init="gaussian"), 0, "query", range(1000))
    columns = np.linalg.qr(normal.reshape(-1, 8, 8).transpose(0, 2, 1))[0]
    assert np.einsum("nii->n", columns).mean() / 8 < -0.15


def test_cayley_has_no_preferred_direction_on_the_diagonal() -> None:
    recipe = recipe_of(64, 64, heads=40, construction="cayley")
    draws = rows_of_heads(recipe, 0, "query", range(40)).reshape(-1, 64, 64)
    assert abs(np.einsum("nii->ni", draws).mean()) < 0.04


@pytest.mark.parametrize("construction", BY_HEAD)
def test_layer_scope_is_orthonormal_across_heads(construction: str) -> None:
    recipe = recipe_of(128, 16, heads=6, scope="layer", construction=construction)
    rows = rows_of_heads(recipe, 0, "query", range(6))
    assert orthonormality_error(rows) <= 1e-12
    assert (head_rows(recipe, 0, "query", 4) == rows[64:80]).all()
    within = rows_of_heads(
        recipe_of(128, 16, heads=6, construction=construction), 0, "query", range(6)
    )
    assert orthonormality_error(within) > 0.1  # head scope is not


def test_layer_scope_of_grouped_queries_makes_each_role_for_its_own_number_of_heads() -> None:
    recipe = recipe_of(64, 8, 8, groups=2, scope="layer")
    assert orthonormality_error(rows_of_heads(recipe, 0, "query", range(8))) <= 1e-12
    assert orthonormality_error(rows_of_heads(recipe, 0, "key", range(2))) <= 1e-12


def test_every_seed_layer_role_head_and_scope_has_its_own_rows() -> None:
    places = list(product((0, 1, 2**40), (0, 1), ROLES, (0, 1)))
    digests = {
        sha256(head_rows(recipe_of(32, 4, 2, seed=seed), n, role, head))
        for seed, n, role, head in places
    }
    digests.add(sha256(head_rows(recipe_of(32, 4, 2, seed=0, scope="layer"), 0, "query", 0)))
    assert len(digests) == len(places) + 1


@pytest.mark.parametrize("construction", BY_HEAD)
def test_a_head_does_not_depend_on_what_else_was_made(construction: str) -> None:
    recipe = recipe_of(64, 6, heads=8, construction=construction)
    together = rows_of_heads(recipe, 1, "key", range(8)).reshape(8, 6, 64)
    np.random.seed(7)
    torch.manual_seed(7)
    global_states = np.random.get_state()[1].copy(), torch.get_rng_state().clone()  # type: ignore[index,union-attr]
    for head in (5, 0, 7, 5):
        assert (head_rows(recipe, 1, "key", head) == together[head]).all()
    more_heads = recipe_of(64, 6, heads=64, construction=construction)
    assert (head_rows(more_heads, 1, "key", 5) == together[5]).all()
    assert (np.random.get_state()[1] == global_states[0]).all()  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), global_states[1])


@pytest.mark.parametrize("construction", BY_HEAD)
def test_a_head_does_not_depend_on_the_thread_count(construction: str) -> None:
    recipe = recipe_of(512, 64, construction=construction)
    digests = set()
    for threads in (1, 2, 4):
        with threadpool_limits(limits=threads, user_api="blas"):
            digests.add(sha256(head_rows(recipe, 0, "query", 0)))
    assert len(digests) == 1


def test_the_stream_has_not_changed() -> None:
    assert sha256(head_rows(recipe_of(64, 16, heads=4), 3, "key", 2)) == GOLDEN_HEAD
    assert sha256(head_rows(recipe_of(64, 16, heads=4, scope="layer"), 3, "key", 2)) == GOLDEN_LAYER
    hadamard, dct = (recipe_of(64, 16, heads=4, construction=name) for name in ("hadamard", "dct"))
    assert sha256(head_rows(hadamard, 3, "key", 2)) == GOLDEN_HADAMARD
    assert sha256(head_rows(dct, 3, "key", 2)) == GOLDEN_DCT


@pytest.mark.parametrize(("std", "expected"), [(None, 512**-0.5), (0.02, 0.02), (1.0, 1.0)])
def test_gaussian_standard_deviation(std: float | None, expected: float) -> None:
    rows = rows_of_heads(
        recipe_of(512, 64, 8, init="gaussian", gaussian_std=std), 0, "query", range(8)
    )
    assert rows.std() == pytest.approx(expected, rel=0.01)
    assert rows.mean() == pytest.approx(0, abs=0.01 * expected)
    assert ((rows / rows.std()) ** 4).mean() == pytest.approx(3, rel=0.05)


def test_matched_gaussian_gives_queries_of_the_orthonormal_length() -> None:
    x = np.random.default_rng(1).standard_normal((100, 512))
    lengths = [
        ((x @ rows_of_heads(recipe_of(512, 64, 8, init=init), 0, "query", range(8)).T) ** 2)
        .sum(axis=1)
        .mean()
        for init in ("orthogonal", "gaussian")
    ]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.02)


def test_recipe_survives_a_checkpoint() -> None:
    recipe = recipe_of(64, 8, 8, groups=2, seed=5, init="gaussian", gaussian_std=0.02)
    assert BankRecipe(**recipe.as_dict()) == recipe  # type: ignore[arg-type]


def test_gaussian_heads_may_be_wider_than_the_model() -> None:
    assert head_rows(recipe_of(16, 32, init="gaussian"), 0, "query", 0).shape == (32, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 65}, "head_dim=65 is larger than hidden_size=64"),
        (
            {"scope": "layer", "head_dim": 17},
            "num_attention_heads \\* head_dim = 68 is larger than hidden_size=64",
        ),
        ({"num_query_groups": 3}, "num_attention_heads=4 is not divisible by num_query_groups=3"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_query_groups": -1}, "num_query_groups=-1"),
        ({"seed": -1}, "seed=-1"),
        (
            {"construction": "hadamar"},
            "construction is 'hadamar'; known: qr, svd, householder, cayley, hadamard, dct",
        ),
        ({"construction": "hadamard", "hidden_size": 96}, "hidden_size=96 is not a power of two"),
        ({"scope": "model"}, "scope is 'model'"),
        ({"init": "default"}, "init is 'default'"),
        ({"gaussian_std": 0.02}, "gaussian_std=0.02"),
        ({"init": "gaussian", "gaussian_std": 0.0}, "gaussian_std=0.0"),
    ],
)
def test_impossible_recipes_name_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    good = {
        "seed": 1,
        "hidden_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_query_groups": 4,
    }
    with pytest.raises(MethodError, match=message):
        BankRecipe(**good | changes)


@pytest.mark.parametrize(
    ("layer", "role", "head", "message"),
    [
        (-1, "query", 0, "layer=-1"),
        (0, "value", 0, "'value'"),
        (0, "query", 4, "query head=4"),
        (0, "key", 2, "key head=2"),
    ],
)
def test_impossible_places_name_what_is_wrong(
    layer: int, role: Any, head: int, message: str
) -> None:
    with pytest.raises(MethodError, match=message):
        head_rows(recipe_of(64, 8, 4, groups=2), layer, role, head)
