"""Shards of the frozen bank: the same heads, bit for bit, under any tensor-parallel size."""

import hashlib
from functools import cache

import pytest
import torch

from megatron_patches.bank.exact import FloatArray
from megatron_patches.bank.head_split import heads_of_rank, split_heads
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import digest, head_digests, orthonormality_errors, role_digest
from megatron_patches.errors import MethodError
from tests.megatron_patches.bank.recipes import head_rows, recipe_of, shard

MULTI_HEAD = recipe_of(64, 8, 8)
GROUPED = recipe_of(64, 8, 16, groups=8)
RECIPES = {
    "multi-head": MULTI_HEAD,
    "grouped": GROUPED,
    "layer scope": recipe_of(64, 8, 8, scope="layer"),
    "hadamard": recipe_of(64, 8, 16, groups=8, construction="hadamard"),
    "dct": recipe_of(64, 8, 16, groups=8, construction="dct"),
}


@cache
def all_heads(recipe: BankRecipe, role: Role) -> list[FloatArray]:
    return [head_rows(recipe, 3, role, head) for head in range(recipe.num_heads(role))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_shards_are_bitwise_slices_of_the_whole(name: str, role: Role, dtype: torch.dtype) -> None:
    """So ranks have consecutive heads of both roles, and query heads beside their key heads."""
    recipe = RECIPES[name]
    heads = all_heads(recipe, role)
    whole = torch.cat([torch.from_numpy(head).to(dtype) for head in heads])
    for size in (1, 2, 4, 8):
        shards = [shard(recipe, 3, role, dtype, rank=rank, size=size) for rank in range(size)]
        assert {tuple(part.shape) for part in shards} == {(len(heads) // size * 8, 64)}
        assert torch.equal(torch.cat(shards), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_digest_is_of_the_bytes_of_the_cast_tensor(dtype: torch.dtype) -> None:
    rows = shard(MULTI_HEAD, 0, "query", dtype, size=2)
    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert digest(rows) == hashlib.sha256(rows.view(as_integers).numpy().tobytes()).hexdigest()
    # How it lies in memory does not matter.
    assert digest(rows.t().contiguous().t()) == digest(rows)
    changed = rows.clone()
    changed.view(as_integers)[5, 7] ^= 1  # one bit
    assert digest(changed) != digest(rows)


def test_role_digest_is_the_same_for_every_tensor_parallel_size() -> None:
    digests = set()
    for size in (1, 2, 4, 8):
        shards = [
            shard(GROUPED, 0, "query", torch.bfloat16, rank=rank, size=size) for rank in range(size)
        ]
        digests.add(role_digest([head for rows in shards for head in head_digests(rows, 8)]))
    assert len(digests) == 1
    swapped = head_digests(shard(GROUPED, 0, "query", torch.bfloat16), 8)[::-1]
    assert role_digest(swapped) not in digests


def test_orthonormality_errors_are_per_head() -> None:
    rows = shard(MULTI_HEAD, 0, "query", torch.float32, size=2)
    rows[8] *= 1.5
    errors = orthonormality_errors(rows, 8)
    assert len(errors) == 4
    assert errors[1] == pytest.approx(1.25, abs=1e-6)
    assert max(errors[0], *errors[2:]) <= 1e-6


def test_a_size_that_does_not_divide_the_heads_names_both_numbers() -> None:
    with pytest.raises(
        MethodError, match="num_query_groups=3 is not divisible by tensor_model_parallel_size=2"
    ):
        shard(recipe_of(64, 8, 6, groups=3), 0, "query", torch.float32, size=2)
    with pytest.raises(
        MethodError, match="num_attention_heads=8 is not divisible by tensor_model_parallel_size=3"
    ):
        shard(MULTI_HEAD, 0, "key", torch.float32, size=3)
    with pytest.raises(MethodError, match="rank 2 does not exist"):
        shard(MULTI_HEAD, 0, "query", torch.float32, rank=2, size=2)


def test_heads_of_a_rank_and_their_order() -> None:
    for size in (0, -2):
        with pytest.raises(
            MethodError, match=f"is not divisible by tensor_model_parallel_size={size}"
        ):
            heads_of_rank(4, 0, size)
    with pytest.raises(MethodError, match="rank -1 does not exist"):
        heads_of_rank(4, -1, 2)
    split = split_heads(8, 4, frozen_groups={1, 3}, rank=0, tensor_parallel_size=1)
    assert split.frozen == {"query": (2, 3, 6, 7), "key": (1, 3)}
    assert split.trainable == {"query": (0, 1, 4, 5), "key": (0, 2)}
    heads = split.frozen["query"] + split.trainable["query"]
    assert [heads[position] for position in split.order("query")] == list(range(8))
    shared = split_heads(8, 4, frozen_groups={1, 3}, rank=1, tensor_parallel_size=2, shared=True)
    assert shared.frozen == {"query": (6, 7), "key": ()} and shared.trainable["key"] == ()
    assert shared.sharing(2).frozen["key"] == (6,) and shared.sharing(2).trainable["key"] == (4,)
    assert split_heads(
        4, 4, frozen_groups={0, 1}, rank=0, tensor_parallel_size=1, roles=("key",)
    ).frozen == {"query": (), "key": (0, 1)}
