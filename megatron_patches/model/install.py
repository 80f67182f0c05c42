"""Specs of a policy's layers: our modules in the places of megatron-core's, nothing patched.

Version-sensitive: writes down megatron-core's spec of a GPT layer, with our modules in their
places.
"""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_patches.attention.head_rows import Rows
from megatron_patches.attention.projections import FrozenQueryKeySelfAttention
from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.attention.scores import CausalDotProductAttention
from megatron_patches.attention.synthesizer import (
    SynthesizerSelfAttention,
    SynthesizerSelfAttentionSubmodules,
)
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.engine.compat import mlp_spec
from megatron_patches.model.layer import Layer
from megatron_patches.model.linear import ColumnParallelLinear, RowParallelLinear
from megatron_patches.model.parts import NORMS, RMSNorm
from megatron_patches.model.penalty import penalized
from megatron_patches.recipe.parts import ModelShape
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import ScoreRecipe
from megatron_patches.recipe.tensors import is_patched


def gpt_block_spec(
    policy: QKPolicy,
    recipe: BankRecipe | ScoreRecipe | None,
    shape: ModelShape,
    phase: int = 0,
    rotary: RotaryAngles | None = None,
) -> TransformerBlockSubmodules:
    """Return the spec of a GPT block with a norm before attention and MLP.

    Args:
        recipe: recipe of the policy's bank or score matrices, if it has any.
        shape: sizes and parts of the model.
        phase: number of the phase in the policy's schedule, from 0.
        rotary: rotation of queries and keys by their positions, if the model has one. It takes the
            place of megatron-core's: the `GPTModel` around the block then has
            position_embedding_type "none".

    Returns:
        What megatron-core's GPTModel takes as `transformer_layer_spec`.

    Raises:
        MethodError: the policy names layers or heads that the model does not have.
    """
    norm: Any = NORMS[shape.norm]
    sizes = shape.num_layers, shape.num_query_groups
    frozen = policy.frozen_groups(*sizes, phase)
    layers = [
        ModuleSpec(
            module=Layer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=_self_attention_spec(
                    policy,
                    recipe,
                    frozen_groups,
                    rotary,
                    qk_norm=shape.qk_norm,
                    learned=Rows.TRAINED if start is None or phase < start else Rows.KEPT,
                ),
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=norm,
                mlp=mlp_spec(ColumnParallelLinear, RowParallelLinear),
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for frozen_groups, start in zip(frozen, policy.kept_from(*sizes), strict=True)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _self_attention_spec(
    policy: QKPolicy,
    recipe: BankRecipe | ScoreRecipe | None,
    frozen_groups: tuple[int, ...],
    rotary: RotaryAngles | None,
    qk_norm: bool,
    learned: Rows,
) -> ModuleSpec:
    if policy.synthesizer:
        return ModuleSpec(
            module=SynthesizerSelfAttention,
            params={"recipe": recipe, "trainable": policy.trainable},
            submodules=SynthesizerSelfAttentionSubmodules(
                linear_v=ColumnParallelLinear, linear_proj=RowParallelLinear
            ),
        )
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    patched = is_patched(policy, frozen_groups)
    # megatron-core builds the module with these beside its own arguments.
    if patched:
        params |= {"policy": policy, "recipe": recipe}
        params |= {"frozen_groups": frozen_groups, "learned": learned}
    # FrozenQueryKeySelfAttention replaces linear_qkv with its own.
    linear_qkv = penalized(policy.penalty) if policy.penalty else ColumnParallelLinear
    norm: Any = RMSNorm if qk_norm else None
    return ModuleSpec(
        module=FrozenQueryKeySelfAttention if patched else SelfAttention,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear_qkv,
            core_attention=ModuleSpec(module=CausalDotProductAttention, params={"rotary": rotary}),
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
