"""Config -> megatron-core GPTModel with the chosen attention, and the loss the loop trains on."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_patches.initialize import initialize_parameters
from megatron_patches.install import gpt_block_spec
from megatron_patches.orthonormal import BankRecipe
from megatron_patches.rotary import RotaryAngles
from pretrain.config.tree import Config
from pretrain.model.packing import document_layout
from pretrain.ranks.groups import ParallelContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(config: Config, context: ParallelContext, phase: int = 0) -> GPTModel:
    """This rank's shard of the model, initialised, on its device, in the compute dtype.

    Args:
        phase: of a run in which layers become trainable on the way (see `config.phases`).
    """
    recipe, policy = config.recipe(), config.policy()
    rotary = None
    if config.model.position_embedding == "rope":
        rotary = RotaryAngles(config.head_dim, config.model.rotary_base)
    model = GPTModel(
        config=transformer_config(config),
        transformer_layer_spec=gpt_block_spec(
            policy, recipe, config.model.num_layers, config.num_query_groups, phase, rotary
        ),
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.data.sequence_length,
        position_embedding_type="none" if rotary is not None else "learned_absolute",
        share_embeddings_and_output_weights=config.model.tied_embeddings,
    )
    start = recipe if policy.trainable and isinstance(recipe, BankRecipe) else None
    initialize_parameters(model, config.run.seed, config.model.init_std, start, config.given_weights)
    # megatron-core makes learned positions in fp32. DeepSpeed's engine would cast them; evaluation has none.
    return model.to(context.device, DTYPES[config.precision.dtype])


def transformer_config(config: Config) -> TransformerConfig:
    """Our model, parallel and precision sections in megatron-core's terms."""
    model, dtype = config.model, DTYPES[config.precision.dtype]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        layernorm_epsilon=model.layernorm_epsilon,
        add_bias_linear=False,
        activation_func=torch.nn.functional.gelu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,  # `initialize_parameters` does it, the same for any layout and variant
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
    )


def token_losses(model: torch.nn.Module, tokens: torch.Tensor, boundary: int | None = None) -> torch.Tensor:
    """Cross-entropy of every next-token prediction.

    Args:
        tokens: `[batch, sequence_length + 1]` int64 on the model's device.
        boundary: the end-of-document id, if documents stand alone (see `packing`); None: packed as one text.

    Returns:
        `[batch, sequence_length]` nats, float32; 0 where a prediction does not count.
    """
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if boundary is None:
        positions = torch.arange(inputs.size(1), device=tokens.device).expand_as(inputs)
        return model(inputs, positions, None, labels=labels)
    layout = document_layout(inputs, boundary)
    losses = model(inputs, layout.positions, layout.attention_mask, labels=labels)
    return losses.masked_fill(~layout.counted, 0.0)
