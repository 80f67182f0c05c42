"""Turning a policy into a megatron-core model: ModuleSpec substitution, never monkey-patching of layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_patches.attention import FrozenQueryKeySelfAttention
from megatron_patches.norm import LayerNorm
from megatron_patches.orthonormal import BankRecipe
from megatron_patches.penalty import PenalizedQueryKeyValueLinear
from megatron_patches.policy import QKPolicy
from megatron_patches.scores import CausalDotProductAttention


def bank_recipe(
    policy: QKPolicy,
    *,
    seed: int,
    hidden_size: int,
    head_dim: int,
    num_attention_heads: int,
    num_query_groups: int,
) -> BankRecipe | None:
    """How the policy's Q and K rows are drawn, or None where they start like every other weight.

    Raises:
        MethodError: the policy is impossible at these sizes.
    """
    if policy.init == "default":
        return None
    return BankRecipe(
        seed=seed,
        hidden_size=hidden_size,
        head_dim=head_dim,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        init=policy.init,
        scope=policy.scope,
        construction=policy.construction,
        gaussian_std=policy.gaussian_std,
    )


def gpt_block_spec(
    policy: QKPolicy, recipe: BankRecipe | None, num_layers: int
) -> TransformerBlockSubmodules:
    """The pre-LN GPT block of `num_layers` layers whose attention follows `policy`, for `GPTModel`."""
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=LayerNorm,
            self_attention=_self_attention_spec(policy, recipe),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=LayerNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=LayerNorm)


def _self_attention_spec(policy: QKPolicy, recipe: BankRecipe | None) -> ModuleSpec:
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    if policy.frozen:
        params["recipe"] = recipe
    # FrozenQueryKeySelfAttention puts its own in this place.
    penalized = partial(PenalizedQueryKeyValueLinear, penalty=policy.penalty)
    linear_qkv = penalized if policy.penalty else ColumnParallelLinear
    return ModuleSpec(
        module=FrozenQueryKeySelfAttention if policy.frozen else SelfAttention,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear_qkv,
            core_attention=CausalDotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
