"""Nothing that megatron-core is asked for is left out without a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules

from megatron_patches.attention.projections import FrozenQueryKeySelfAttention
from megatron_patches.attention.scores import CausalDotProductAttention
from megatron_patches.errors import MethodError
from megatron_patches.model.gpt import refuse_unapplied
from megatron_patches.model.linear import ColumnParallelLinear, RowParallelLinear
from megatron_patches.model.parts import MLPS
from megatron_patches.recipe.variants import policy_for
from tests.megatron_patches.models import HEADS, HIDDEN, LAYERS, build

PARTS = SelfAttentionSubmodules(
    linear_qkv=ColumnParallelLinear,
    core_attention=CausalDotProductAttention,
    linear_proj=RowParallelLinear,
)


def config_of(**options: Any) -> TransformerConfig:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    return TransformerConfig(**sizes, add_bias_linear=False, **options)


def test_options_that_are_applied_are_not_refused() -> None:
    refuse_unapplied(config_of(hidden_dropout=0.3, num_query_groups=2, kv_channels=6, bf16=True))
    refuse_unapplied(config_of(params_dtype=torch.bfloat16, **MLPS["gelu"]))
    refuse_unapplied(config_of(gated_linear_unit=True))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("qk_layernorm", True),
        ("normalization", "RMSNorm"),
        ("layernorm_zero_centered_gamma", True),
        ("rotary_interleaved", True),
        ("softmax_scale", 0.5),
        ("num_moe_experts", 2),
        ("recompute_granularity", "selective"),
        ("apply_query_key_layer_scaling", True),
        ("fp32_residual_connection", True),
    ],
)
def test_other_options_are_refused_in_a_sentence(option: str, value: object) -> None:
    with pytest.raises(MethodError, match=rf"{option}=.* is not applied .*; leave it out$"):
        refuse_unapplied(config_of(**{option: value}))


@dataclass
class Gated(SelfAttentionSubmodules):
    """Parts of a later megatron-core."""

    linear_gate: Any = None


def test_frozen_layers_refuse_parts_that_they_would_not_apply(one_rank: dist.ProcessGroup) -> None:
    attention = build("orthogonal").decoder.layers[0].self_attention
    linear = attention.linear_qkv
    assert isinstance(attention, FrozenQueryKeySelfAttention)
    with pytest.raises(MethodError, match="without megatron-core's linear_gate; leave it out"):
        FrozenQueryKeySelfAttention(
            attention.config,
            Gated(**vars(PARTS), linear_gate=ColumnParallelLinear),
            layer_number=1,
            policy=policy_for("orthogonal"),
            recipe=linear.recipe,
            frozen_groups=linear.frozen_groups,
        )
