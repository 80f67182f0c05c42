"""The model section of the configuration: shape of the model, its parts, its initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from megatron_patches.recipe.block import MLPS, NORMS, Mlp, Norm
from pretrain.config.sections import MODEL, SHAPE
from pretrain.config.types import Int, PathLike, Section, setting

if TYPE_CHECKING:
    NormName = str
    MlpName = str
else:
    NormName = Literal[tuple(NORMS)]
    MlpName = Literal[tuple(MLPS)]


def _meanings(parts: Mapping[str, Norm] | Mapping[str, Mlp]) -> str:
    return ", ".join(f"{name} ({part.meaning})" for name, part in parts.items())


class ModelSection(Section):
    """Shape of the model, and its initial weights."""

    num_layers: Int = setting(..., "Transformer layers.", SHAPE, ge=1, le=10_000)
    hidden_size: Int = setting(..., "Width of the residual stream.", SHAPE, ge=1)
    num_attention_heads: Int = setting(..., "Query heads per layer.", SHAPE, ge=1)
    num_query_groups: Int | None = setting(
        None,
        "Key/value heads per layer (grouped-query attention); unset: num_attention_heads.",
        SHAPE,
        ge=1,
    )
    head_dim: Int | None = setting(
        None, "Width of one head; unset: hidden_size / num_attention_heads.", SHAPE, ge=1
    )
    ffn_hidden_size: Int | None = setting(
        None,
        "Inner width of the MLP; unset: 4 * hidden_size, or with swiglu 8/3 * hidden_size, rounded "
        "up to a multiple of 128 (of 16 if hidden_size is below 384).",
        SHAPE,
        ge=1,
    )
    norm: NormName = setting(
        "layernorm", f"Norm before attention, MLP and output: {_meanings(NORMS)}.", SHAPE
    )
    mlp: MlpName = setting("gelu", f"MLP: {_meanings(MLPS)}.", SHAPE)
    vocab_size: Int = setting(..., "Vocabulary size of the tokenizer.", SHAPE, ge=2)
    vocab_multiple: Int = setting(
        1,
        "Pad the embedding to a multiple of this; padding rows are never predicted nor exported.",
        MODEL,
        ge=1,
    )
    position_embedding: Literal["learned", "rope"] = setting(
        ...,
        "learned: a trained vector per position; rope: rotary position embedding.",
        SHAPE,
    )
    rotary_base: Int = setting(10000, "Base of the rotary frequencies (rope only).", SHAPE, ge=2)
    qk_norm: bool = setting(
        False,
        "RMS norm of each head's queries and keys before positions rotate them, with gains "
        "[head_dim] that the heads of a layer share.",
        SHAPE,
    )
    logit_softcap: float | None = setting(
        None, "Soft cap c of the logits, c tanh(logits / c); unset: none.", MODEL, gt=0
    )
    z_loss: float = setting(
        0.0,
        "Add this times the mean square of the logits' log-sum-exp to the training loss.",
        MODEL,
        ge=0,
    )
    dropout: float = setting(
        0.1, "Dropout probability of hidden states and attention probabilities.", MODEL, ge=0, lt=1
    )
    layernorm_epsilon: float = setting(1e-5, "Epsilon of the norms.", MODEL, gt=0)
    init_std: float = setting(
        0.02,
        "Standard deviation of initial weights (output projections: / sqrt(2 * num_layers)); with "
        "init=fan_in of embeddings only.",
        MODEL,
        gt=0,
    )
    init: Literal["normal", "fan_in"] = setting(
        "normal",
        "Initial matrices. normal: N(0, init_std^2); fan_in: N(0, 1/columns), but zero for those "
        "whose output is added to the residual stream.",
        MODEL,
    )
    tied_embeddings: bool = setting(True, "Tie the output layer to the embedding matrix.", SHAPE)
    initial_weights: PathLike | None = setting(
        None,
        "Initial weights, a file of `python -m pretrain import`; unset: random initialization.",
        replace(MODEL, note="compared by what the file holds"),
    )
