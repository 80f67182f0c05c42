"""From a policy to how its weights are drawn."""

from __future__ import annotations

import pytest

from megatron_patches.errors import MethodError
from megatron_patches.recipe.recipes import bank_recipe, score_recipe
from megatron_patches.recipe.variants import VARIANTS

SIZES = {
    "seed": 1,
    "hidden_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_query_groups": 4,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_a_bank_or_scores_or_neither(variant: str) -> None:
    policy = VARIANTS[variant]
    if policy.init == "pretrained":
        with pytest.raises(MethodError, match=r"set model\.initial_weights"):
            bank_recipe(policy, **SIZES)
        return
    bank = bank_recipe(policy, **SIZES)
    scores = score_recipe(policy, seed=1, num_attention_heads=4, sequence_length=16)
    assert (bank is not None) == (policy.init not in ("default", "low_rank"))
    assert (scores is not None) == policy.synthesizer
    assert bank is None or scores is None
