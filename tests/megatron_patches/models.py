"""A small GPT with any attention, in sizes without coincidences.

Each matrix product can be told by its result's shape.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.model.initialize import initialize_parameters
from megatron_patches.model.install import gpt_block_spec
from megatron_patches.recipe.parts import ModelShape
from megatron_patches.recipe.recipes import bank_recipe, score_recipe
from megatron_patches.recipe.tensors import tensors
from megatron_patches.recipe.variants import policy_for

LAYERS, HIDDEN, HEADS, HEAD_DIM, SEQ, VOCAB, SEED, STD = 2, 40, 4, 6, 10, 64, 5, 0.02


def build(
    variant: str,
    groups: int = HEADS,
    dtype: torch.dtype = torch.float32,
    rotary: RotaryAngles | None = None,
    initial_weights: GivenWeights | None = None,
    *,
    layers: int = LAYERS,
    length: int = SEQ,
    seed: int = SEED,
    dropout: float = 0.0,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    qk_norm: bool = False,
    **axes: Any,
) -> GPTModel:
    """Initialised as the program initialises it; `axes` are those of `policy_for`."""
    policy = policy_for(variant, axes)
    bank = bank_of(variant, groups, seed, **axes)
    scores = score_recipe(policy, seed=seed, num_attention_heads=HEADS, sequence_length=length)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=HEAD_DIM,
        hidden_dropout=0.0,
        attention_dropout=dropout,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        params_dtype=dtype,
        tensor_model_parallel_size=tensor_parallel_size,
        sequence_parallel=sequence_parallel,
    )
    shape = ModelShape(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        head_dim=HEAD_DIM,
        ffn_hidden_size=4 * HIDDEN,
        vocab_size=VOCAB,
        sequence_length=length,
        learned_positions=True,
        tied_embeddings=True,
        qk_norm=qk_norm,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=gpt_block_spec(policy, scores or bank, shape, rotary=rotary),
        vocab_size=VOCAB,
        max_sequence_length=length,
        share_embeddings_and_output_weights=True,
    )
    inventory = tensors(shape, policy)
    initialize_parameters(
        model, inventory, seed=seed, init_std=STD, recipe=bank, given=initial_weights
    )
    return model


def bank_of(variant: str, groups: int = HEADS, seed: int = SEED, **axes: Any) -> BankRecipe | None:
    """Return how the frozen rows of such a model are made."""
    return bank_recipe(
        policy_for(variant, axes),
        seed=seed,
        hidden_size=HIDDEN,
        head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=groups,
    )
