"""Which attention a policy puts into which layer."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention

from megatron_patches.attention.projections import FrozenQueryKeySelfAttention
from megatron_patches.attention.scores import CausalDotProductAttention
from megatron_patches.attention.synthesizer import SynthesizerSelfAttention
from megatron_patches.model.linear import ColumnParallelLinear
from megatron_patches.model.penalty import PenalizedQueryKeyValueLinear
from megatron_patches.recipe.variants import VARIANTS
from tests.megatron_patches.models import build

NOT_BUILT = ("hadamard", "pretrained")
"""6 is no power of 2; the other needs a file."""


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in NOT_BUILT])
def test_a_variants_layers_have_its_attention(one_rank: dist.ProcessGroup, variant: str) -> None:
    policy = VARIANTS[variant]
    axes = {"frozen_heads": (("0%-100%", 1.0),)} if policy.frozen_heads else {}
    expected = FrozenQueryKeySelfAttention
    if policy.trainable and policy.init != "low_rank" and not policy.trains_factors:
        expected = SynthesizerSelfAttention if policy.synthesizer else SelfAttention
    for layer in build(variant, **axes).decoder.layers:
        assert type(layer.self_attention) is expected
        if not policy.synthesizer:  # whatever makes queries and keys, one kernel compares them
            assert type(layer.self_attention.core_attention) is CausalDotProductAttention
        if expected is SelfAttention:
            linear = PenalizedQueryKeyValueLinear if policy.penalty else ColumnParallelLinear
            assert isinstance(layer.self_attention.linear_qkv, linear)
            assert hasattr(layer.self_attention.linear_qkv, "penalty") == bool(policy.penalty)


def test_a_layer_without_frozen_heads_is_the_stock_one(one_rank: dist.ProcessGroup) -> None:
    first, second = build("hybrid", frozen_heads=(("1", 0.5),)).decoder.layers
    assert type(first.self_attention) is SelfAttention
    assert type(second.self_attention) is FrozenQueryKeySelfAttention
    assert second.self_attention.linear_qkv.frozen_groups == (1, 3)
