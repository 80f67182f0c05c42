"""The measurement by which a run chooses how to multiply by structured rows."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.bank.monarch import Factors, project
from megatron_patches.bank.monarch_kernel import TILES, Tile
from megatron_patches.bank.orthonormal import BankRecipe, factors_of_heads
from pretrain.model import structured_products
from pretrain.model.structured_products import PRODUCTS, fastest, way_of

WAYS = (None, *TILES)


def some_factors(dtype: torch.dtype = torch.float32) -> Factors:
    recipe = BankRecipe(
        1,
        64,
        head_dim=16,
        num_attention_heads=4,
        num_query_groups=2,
        scope="layer",
        construction="monarch",
    )
    made = factors_of_heads(recipe, 0, [("query", range(4)), ("key", range(2))])
    return Factors(*(torch.from_numpy(part).to(dtype) for part in (made.right, made.left)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_that_took_the_least_time_is_chosen(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    found = fastest(some_factors(dtype), tokens=24, tiles=WAYS)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.milliseconds.keys() == {way_of(tile) for tile in WAYS}
    assert min(found.milliseconds.values()) == found.milliseconds[way_of(found.tile)] > 0
    assert found.reason == "measured" and found.as_dict()["way"] == way_of(found.tile)


def test_a_kernel_that_fails_or_is_wrong_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor, factors: Factors, tile: Tile | None = None) -> torch.Tensor:
        if tile == TILES[0]:
            raise RuntimeError("out of shared memory")
        return project(x, factors, tile) * (1.0 if tile is None else 1.01)

    monkeypatch.setattr(structured_products, "project", broken)
    found = fastest(some_factors(), tokens=24, tiles=WAYS)
    assert found.tile is None and found.milliseconds.keys() == {PRODUCTS}
    wrong = "; ".join(f"{way_of(tile)}: wrong" for tile in TILES[1:])
    assert found.reason == f"measured; {way_of(TILES[0])}: RuntimeError; {wrong}"
    none = fastest(some_factors(), tokens=24, tiles=TILES)
    assert none.tile is None and not none.milliseconds and none.reason == found.reason
