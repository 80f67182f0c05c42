"""Config -> megatron-core GPTModel with the chosen attention, and the loss the loop trains on."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from shutil import which

import torch
from megatron.core.transformer import TransformerConfig

from megatron_patches.attention.adapters import require_effect
from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.engine.compat import allow_graphs, mend_inductor
from megatron_patches.model.gpt import GPT
from megatron_patches.model.initialize import initialize_parameters
from megatron_patches.model.install import gpt_block_spec
from megatron_patches.model.output import LogitTerms
from megatron_patches.model.parts import MLPS
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.model.packing import document_layout
from pretrain.ranks.groups import ParallelContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(config: Config, context: ParallelContext, phase: int = 0) -> GPT:
    """Build this rank's shard of the model, initialised, on its device, in the compute dtype.

    Args:
        phase: number of the phase, of a run in which other weights train later (see
            `config.schedule`).
    """
    recipe, policy = config.recipe, config.policy
    transformer = transformer_config(config)
    in_pieces = flash_documents(config, context.device)
    rotary = None
    if config.model.position_embedding == "rope":
        rotary = RotaryAngles(config.head_dim, config.model.rotary_base)
    sizes = policy.adapter_sizes(config.model.hidden_size, config.head_dim)
    require_effect(policy.corrections, sizes, qk_norm=config.model.qk_norm)
    layers = gpt_block_spec(policy, recipe, config.shape, phase=phase, rotary=rotary)
    model = GPT(
        config=transformer,
        transformer_layer_spec=layers,
        vocab_size=config.embedding_rows,
        pieces=config.model.vocab_size,
        max_sequence_length=config.data.sequence_length,
        position_embedding_type="none" if rotary is not None else "learned_absolute",
        share_embeddings_and_output_weights=config.model.tied_embeddings,
        cross_entropy=config.performance.cross_entropy,
        logit_terms=LogitTerms(config.model.logit_softcap, config.model.z_loss),
        flash_documents=in_pieces,
        inventory=config.inventories[phase],
    )
    for layer in model.decoder.layers:
        layer.recompute_in_backward(config.performance.recompute)
    initialize_parameters(
        model,
        model.inventory,
        seed=config.run.seed,
        init_std=config.model.init_std,
        recipe=recipe if isinstance(recipe, BankRecipe) else None,
        given=config.given_weights,
        fan_in=config.model.init == "fan_in",
    )
    # megatron-core makes learned positions in fp32. DeepSpeed's engine would cast them; evaluation
    # has none.
    return model.to(context.device, DTYPES[config.precision.dtype])


def flash_documents(config: Config, device: torch.device) -> bool:
    """Return whether separate documents are attended without a mask."""
    kernel = device.type == "cpu" or config.precision.dtype == "bf16"
    possible = kernel and not config.policy.synthesizer
    return possible and config.performance.document_attention == "flash"


def compile_layers(model: GPT, backend: str) -> None:
    """Run the layers of `model`, and its loss, compiled from now on.

    Args:
        backend: torch.compile's backend: `inductor` makes kernels, `aot_eager` runs the graphs with
            torch's own.

    Raises:
        UserError: inductor has no compiler to make kernels for the CPU with.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    compilers = (os.environ.get("CXX", "g++"), "clang++")
    if backend == "inductor" and on_cpu and not any(map(which, compilers)):
        raise UserError(
            "performance.compile=layers needs a C++ compiler on the CPU and finds no g++; "
            "install one, name it in CXX, or set performance.compile=none"
        )
    allow_graphs(4 * len(model.decoder.layers) + 8)
    mend_inductor()
    for layer in model.decoder.layers:
        layer.compile_parts(backend)
    model.output_layer.compile_passes(backend)


def compiling_nothing() -> AbstractContextManager[object]:
    """Return a context in which compiled layers run as written, at sizes not compiled for.

    Where nothing is compiled it does nothing, and does not load torch's compiler.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def transformer_config(config: Config) -> TransformerConfig:
    """Translate our model, parallel and precision sections into megatron-core's terms."""
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
        **MLPS[config.shape.mlp],
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,  # `initialize_parameters` does it, the same for any layout
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
    )


def token_losses(
    model: torch.nn.Module, tokens: torch.Tensor, boundary: int | None = None
) -> torch.Tensor:
    """Return the cross-entropy of every next-token prediction.

    Args:
        tokens: `[batch, sequence_length + 1]` int64 on the model's device.
        boundary: the end-of-document id, if documents stand alone (see `packing`); None: packed as
            one text.

    Returns:
        `[batch, sequence_length]` nats, float32; 0 where a prediction does not count.
    """
    inputs = tokens[:, :-1].contiguous()
    labels = tokens[:, 1:].contiguous()
    layout = document_layout(inputs, boundary)
    losses = model(inputs, layout.positions, layout.documents, labels=labels)
    return losses if layout.counted is None else losses.masked_fill(~layout.counted, 0.0)


def take_squared_normalisers(
    model: GPT, tokens: torch.Tensor, boundary: int | None = None
) -> torch.Tensor | None:
    """Return the sum of (log Σ exp logits)² over the predictions of the last losses that count.

    Args:
        model: the model whose losses were taken last, with gradients.
        tokens: ids of these losses, `[batch, sequence_length + 1]`.
        boundary: the end-of-document id, if documents stand alone; None: packed as one text.

    Returns:
        A number in fp64 on the device; None where the model has no z-loss.
    """
    normalisers = model.output_layer.take_log_normalisers()
    if normalisers is None:
        return None
    squares = normalisers.square()
    counted = document_layout(tokens[:, :-1].contiguous(), boundary).counted
    if counted is not None:
        squares = squares.masked_fill(~counted, 0.0)
    return squares.sum()


def logits_at(
    model: torch.nn.Module, inputs: torch.Tensor, at: torch.Tensor, boundary: int | None = None
) -> torch.Tensor:
    """Return logits `[batch, vocabulary/tp]` of the token after one position of each row.

    Args:
        inputs: `[batch, seq]` int64 on the model's device; nothing after the position has any
            effect.
        at: `[batch]` int64, the positions.
        boundary: the end-of-document id, if documents stand alone; None: packed as one text.
    """
    layout = document_layout(inputs, boundary)
    return model(inputs, layout.positions, layout.documents, at=at)
