"""The construction monarch: what its factors are, what they stand for, and products with them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from megatron_patches.bank.exact import orthonormality_error
from megatron_patches.bank.factors import Block, block_sizes, haar_blocks
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.monarch import Factors, add_input_grad, project
from megatron_patches.bank.orthonormal import (
    ROLES,
    BankRecipe,
    factors_of_heads,
    rows_of_heads,
)
from megatron_patches.bank.shards import head_digests, rank_factors
from megatron_patches.errors import MethodError
from tests.megatron_patches.bank import recipes
from tests.megatron_patches.bank.recipes import head_rows, sha256, shard

SHAPES = (
    (1024, 64, 16, 16),
    (768, 64, 12, 4),
    (128, 32, 4, 4),
    (48, 12, 4, 2),
    (40, 6, 4, 2),
    (6, 2, 3, 1),
)
GOLDEN = "070d88e44ceb0715510ff1a929209d58c94dbbca1d4f474a1866aa1d239353c7"


def recipe_of(hidden_size: int, head_dim: int, heads: int, groups: int) -> BankRecipe:
    axes = {"scope": "layer", "construction": "monarch"}
    return recipes.recipe_of(hidden_size, head_dim, heads, groups=groups, **axes)


def factors_of_rank(
    recipe: BankRecipe, layer: int, dtype: torch.dtype, rank: int = 0, size: int = 1
) -> Factors:
    """Factors of a rank among `size` that has frozen heads alone, by default of the only one."""
    groups = recipe.num_query_groups
    split = split_heads(
        recipe.num_attention_heads,
        groups,
        frozen_groups=range(groups),
        rank=rank,
        tensor_parallel_size=size,
    )
    return rank_factors(recipe, layer, split.frozen, dtype)


@pytest.mark.parametrize(
    ("hidden_size", "head_dim", "expected"),
    [
        (1024, 64, (32, 32)),
        (2048, 64, (32, 64)),
        (2048, 128, (32, 64)),
        (512, 64, (16, 32)),
        (768, 64, (32, 24)),  # 24 · 32 would cut heads
        (1600, 64, (32, 50)),
        (128, 32, (8, 16)),
        (1018, 2, (2, 509)),
    ],
)
def test_a_and_b_are_near_the_root_and_a_divides_a_head(
    hidden_size: int, head_dim: int, expected: tuple[int, int]
) -> None:
    assert block_sizes(hidden_size, head_dim) == expected


@pytest.mark.parametrize(
    ("hidden_size", "head_dim"), [(31, 31), (31, 1), (1009, 64), (35, 6), (1, 1)]
)
def test_sizes_without_a_common_factor_are_refused(hidden_size: int, head_dim: int) -> None:
    with pytest.raises(
        MethodError, match=rf"hidden_size={hidden_size} .* head_dim={head_dim}|larger"
    ):
        recipe_of(hidden_size, head_dim, 1, 1)


def test_head_scope_is_refused() -> None:
    with pytest.raises(MethodError, match="use scope 'layer'"):
        BankRecipe(
            1, 64, head_dim=16, num_attention_heads=4, num_query_groups=4, construction="monarch"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_orthonormal_across_the_layer_and_any_heads_of_it(shape: tuple[int, ...]) -> None:
    recipe = recipe_of(*shape)
    hidden_size, head_dim, heads, groups = shape
    query = rows_of_heads(recipe, 1, "query", range(heads))
    assert query.shape == (heads * head_dim, hidden_size)
    assert orthonormality_error(query) <= 1e-14
    assert orthonormality_error(rows_of_heads(recipe, 1, "key", range(groups))) <= 1e-14
    some = range(heads - 1, -1, -2)
    assert (
        rows_of_heads(recipe, 1, "query", some)
        == query.reshape(heads, head_dim, -1)[list(some)].reshape(-1, hidden_size)
    ).all()


def test_the_rows_are_the_factors_multiplied_out() -> None:
    """W = blockdiag(A) P blockdiag(B), written down with whole matrices."""
    recipe = recipe_of(48, 12, 4, 4)
    a, b = block_sizes(48, 12)
    factors = factors_of_heads(recipe, 0, [("query", range(4))])
    right = torch.from_numpy(factors.right)
    left = torch.from_numpy(factors.left)
    transposed = torch.eye(48, dtype=torch.float64).view(a, b, 48).transpose(0, 1).reshape(48, 48)
    whole = torch.block_diag(*left) @ transposed @ torch.block_diag(*right)
    assert np.array_equal(whole.numpy(), factors.rows())
    assert np.array_equal(rows_of_heads(recipe, 0, "query", range(4)), factors.rows())


def test_blocks_are_haar() -> None:
    """tr Q of Haar orthogonal matrices has moments 0, 1, 0, 3; one row is uniform on the sphere."""
    blocks = haar_blocks(3, 0, [Block(0, "left", number) for number in range(20_000)], 8)
    trace = np.trace(blocks, axis1=1, axis2=2)
    for power, expected, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (trace**power).mean() == pytest.approx(expected, abs=4 * spread**0.5 / 20_000**0.5)
    assert np.linalg.det(blocks).mean() == pytest.approx(0, abs=4 / 20_000**0.5)
    for row, column in product((0, 7), (0, 7)):
        entries = blocks[:, row, column]
        assert (entries**2).mean() == pytest.approx(1 / 8, rel=0.05)
        assert (entries**4).mean() == pytest.approx(3 / (8 * 10), rel=0.08)


def test_entries_have_the_mean_and_variance_of_haar_and_its_nine_thirds_of_a_kurtosis() -> None:
    """E w = 0, E w² = 1/d, E w⁴ / (E w²)² = 9 d / ((a + 2)(b + 2))."""
    rows = rows_of_heads(recipe_of(1024, 64, 16, 16), 0, "key", range(16))
    assert rows.mean() == pytest.approx(0, abs=1e-4)
    assert (rows**2).mean() == pytest.approx(1 / 1024, rel=1e-12)  # rows of length 1
    assert (rows**4).mean() * 1024**2 == pytest.approx(9 * 1024 / 34**2, rel=0.02)


def test_every_block_has_a_stream_of_its_own() -> None:
    places = list(product((0, 1, 2**40), (0, 1), (0, 1), ("left", "right"), (0, 1)))
    digests = {
        sha256(haar_blocks(seed, layer, [Block(role, factor, number)], 8))  # type: ignore[arg-type]
        for seed, layer, role, factor, number in places
    }
    assert len(digests) == len(places)


@pytest.mark.parametrize("size", (2, 3, 8, 32))
def test_a_block_does_not_depend_on_what_else_is_made(size: int) -> None:
    blocks = [
        Block(role, factor, number)
        for role in (0, 1)
        for factor in ("left", "right")
        for number in range(9)
    ]  # type: ignore[arg-type]
    together = haar_blocks(1, 2, blocks, size)
    for position in (0, 7, 35):
        assert (haar_blocks(1, 2, [blocks[position]], size) == together[position]).all()


def test_the_bits_are_those_of_sums_taken_one_by_one() -> None:
    """What numpy must do whatever its vector width: plain Python floats give the same block."""
    size = 9
    key = np.random.SeedSequence(5, spawn_key=(0x4F5243, 3)).generate_state(2, np.uint64)
    stream = np.random.Generator(np.random.Philox(key=key, counter=[0, 1, 4, 1]))
    deviates = (np.rint(stream.standard_normal(size * (size + 1) // 2) * 2**16) / 2**16).tolist()
    block = [[float(i == j) for j in range(size)] for i in range(size)]
    for j in reversed(range(size)):
        vector, deviates = deviates[-(size - j) :], deviates[: -(size - j)]
        squares = 0.0
        for value in vector:
            squares += value * value
        sign = -1.0 if vector[0] < 0 else 1.0
        vector[0] += sign * squares**0.5
        squares = 0.0
        for value in vector:
            squares += value * value
        for column in range(j, size):
            dot = 0.0
            for i, value in enumerate(vector):
                dot += value * block[j + i][column]
            for i, value in enumerate(vector):
                block[j + i][column] -= value * (2.0 / squares * dot)
        for row in range(j, size):
            block[row][j] *= -sign
    assert haar_blocks(5, 3, [Block(1, "right", 4)], size)[0].tolist() == block


def test_the_stream_has_not_changed() -> None:
    assert sha256(head_rows(recipe_of(64, 16, 4, 4), 3, "key", 2)) == GOLDEN


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", [(768, 64, 12, 4), (48, 12, 4, 2)])
def test_factors_and_rows_are_the_same_for_any_tensor_parallel_size(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    recipe = recipe_of(*shape)
    _, head_dim, heads, groups = shape
    for role in ROLES:
        whole = shard(recipe, 1, role, dtype)
        for size in (1, 2):
            parts = [shard(recipe, 1, role, dtype, rank=rank, size=size) for rank in range(size)]
            assert torch.equal(torch.cat(parts), whole)
            digests = [digest for part in parts for digest in head_digests(part, head_dim)]
            assert digests == head_digests(whole, head_dim)
    for size in (1, 2):
        rank_shares = [
            factors_of_rank(recipe, 1, dtype, rank=rank, size=size) for rank in range(size)
        ]
        count = heads * head_dim // size
        query = torch.cat([factors.rows()[:count] for factors in rank_shares])
        assert torch.equal(query, shard(recipe, 1, "query", dtype))
        assert sum(part.numel() for factors in rank_shares for part in factors) == sum(
            block_sizes(shape[0], head_dim)
        ) * head_dim * (heads + groups)


@pytest.mark.parametrize("shape", [(128, 32, 4, 2), (768, 64, 12, 4), (48, 12, 4, 4)])
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_products_are_those_of_the_dense_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hidden_size = shape[0]
    factors = factors_of_rank(recipe_of(*shape), 0, dtype)
    rows = Factors(*(factor.double() for factor in factors)).rows()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 3, hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(10, 3, len(rows), generator=generator, dtype=torch.float64).to(dtype)
    total = torch.randn(30, hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    output = project(x, factors)
    assert output.is_contiguous() and output.dtype == dtype
    torch.testing.assert_close(output.double(), x.double() @ rows.T, rtol=0, atol=tolerance)
    expected = total.double() + grad.double().flatten(0, 1) @ rows
    added = add_input_grad(grad, factors, total)
    assert added.data_ptr() == total.data_ptr()
    torch.testing.assert_close(added.double(), expected, rtol=0, atol=2 * tolerance)
    strided = torch.randn(10, 3, 2 * hidden_size, generator=generator, dtype=torch.float64).to(
        dtype
    )
    torch.testing.assert_close(
        project(strided[..., :hidden_size], factors),
        project(strided[..., :hidden_size].contiguous(), factors),
    )


def test_a_compiler_gets_one_operator_that_computes_the_same_bits() -> None:
    factors = factors_of_rank(recipe_of(128, 32, 4, 2), 0, torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, total = (torch.randn(10, 3, 128, generator=generator) for _ in range(2))
    grad = torch.randn(10, 3, 192, generator=generator)
    graphs = []

    def both(total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return project(x, factors), add_input_grad(grad, factors, total)

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(
            [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        )
        return graph

    compiled = torch.compile(both, backend=backend, fullgraph=True, dynamic=False)(
        total.flatten(0, 1).clone()
    )
    expected = both(total.flatten(0, 1).clone())
    assert all(map(torch.equal, compiled, expected))
    assert [name for name in graphs[0] if "bmm" in name] == []
