"""megatron-core's GPTModel with an output layer that computes the loss.

Version-sensitive: relies on the parts of megatron-core's GPTModel and on the work of its
constructor, and knows which options of its TransformerConfig the layers here apply.
"""

from __future__ import annotations

from copy import copy
from dataclasses import fields

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_patches.engine.documents import Documents, Visible
from megatron_patches.errors import MethodError
from megatron_patches.model.output import CrossEntropy, LogitTerms, OutputLayer
from megatron_patches.recipe.parts import Tensor

APPLIED = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "ffn_hidden_size",
        "hidden_dropout",
        "attention_dropout",
        "layernorm_epsilon",
        "add_bias_linear",
        "activation_func",
        "gated_linear_unit",
        "params_dtype",
        "pipeline_dtype",
        "bf16",
        "tensor_model_parallel_size",
        "sequence_parallel",
        # How weights are drawn: `initialize` does that.
        "perform_initialization",
        "init_method",
        "output_layer_init_method",
        "embedding_init_method",
        # How fast megatron-core computes the same: its fused kernels are not used.
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
    }
)
"""Options of megatron-core's TransformerConfig that layers here apply, or that change no result."""


def refuse_unapplied(config: TransformerConfig) -> None:
    """Refuse a configuration with an option that the layers here would silently ignore.

    Raises:
        MethodError: an option outside APPLIED does not have its default.
    """
    applied = {field.name for field in fields(config)} & APPLIED
    # Defaults may depend on other options, so they are those of a config with the same ones.
    defaults = type(config)(**{name: getattr(config, name) for name in applied})
    for field in fields(config):
        value = getattr(config, field.name)
        default_value = getattr(defaults, field.name)
        if field.name not in applied and value != default_value:
            raise MethodError(
                f"megatron-core's option {field.name}={value!r} is not applied by the layers of "
                f"this program, which have {default_value!r}; leave it out"
            )


class GPT(GPTModel):
    """GPTModel with our `OutputLayer`; names and shapes of parameters are GPTModel's.

    Args:
        pieces: pieces of the tokenizer; an embedding of `vocab_size` rows may have more, which are
            never predicted.
        cross_entropy: form of the cross-entropy, see `output`.
        flash_documents: attend documents that stand alone one by one; False: with a mask.
        inventory: every parameter and buffer of the model.

    The other arguments are GPTModel's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules,
        vocab_size: int,
        pieces: int,
        max_sequence_length: int,
        position_embedding_type: str,
        share_embeddings_and_output_weights: bool,
        cross_entropy: CrossEntropy,
        logit_terms: LogitTerms,
        flash_documents: bool,
        inventory: tuple[Tensor, ...],
    ) -> None:
        refuse_unapplied(config)
        layers = transformer_layer_spec.layer_specs or []
        parts = [layer.submodules.self_attention.submodules for layer in layers]
        config = copy(config)  # megatron-core 0.19 wants this said beside the parts
        config.qk_layernorm = any(getattr(part, "q_layernorm", None) for part in parts)
        super().__init__(
            config=config,
            transformer_layer_spec=transformer_layer_spec,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            position_embedding_type=position_embedding_type,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
        )
        self.cross_entropy = cross_entropy
        self.flash_documents = flash_documents
        self.inventory = inventory
        self.output_layer = OutputLayer(
            config,
            vocab_size,
            pieces,
            tied=share_embeddings_and_output_weights,
            tp_group=self.pg_collection.tp,
            in_place=cross_entropy == "in_place",
            terms=logit_terms,
        )
        # Again, as in GPTModel's constructor: the output layer is another one now.
        self.setup_embeddings_and_output_layer()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Visible,
        labels: torch.Tensor | None = None,
        at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits `[batch, seq, vocabulary/tp]`, or with labels the losses `[batch, seq]`.

        Args:
            input_ids: `[batch, seq]` int64.
            position_ids: `[batch, seq]` int64.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a query must not see a key (the
                future included), or documents that stand alone; None: causal.
            labels: `[batch, seq]` int64, the ids to predict; None: return logits.
            at: `[batch]`, a position of each row; with it only the logits there, `[batch,
                vocabulary/tp]`.
        """
        if isinstance(attention_mask, Documents):
            attend_alone = self.flash_documents
            attention_mask = (
                attention_mask.with_boundaries() if attend_alone else attention_mask.mask()
            )
        hidden_states = self.decoder(
            hidden_states=self.embedding(input_ids=input_ids, position_ids=position_ids),
            attention_mask=attention_mask,
        )
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        if at is not None:
            return self._logits_at(hidden_states, weight, at)
        if labels is None or self.cross_entropy == "megatron":
            logits, _ = self.output_layer(hidden_states, weight=weight)
            if labels is None:
                return logits.transpose(0, 1).contiguous()
            return self.compute_language_model_loss(labels, logits)
        losses, _ = self.output_layer(hidden_states, weight=weight, labels=labels)
        return losses

    def _logits_at(
        self, hidden_states: torch.Tensor, weight: torch.Tensor | None, at: torch.Tensor
    ) -> torch.Tensor:
        """Return logits `[batch, vocabulary/tp]` at one position of each row of the batch."""
        length = hidden_states.size(0)
        row = torch.arange(at.size(0), device=at.device)
        # With sequence parallelism the output layer joins one position of every rank's part, and
        # one of these is the position asked for.
        logits, _ = self.output_layer(hidden_states[at % length, row][None], weight=weight)
        chosen: torch.Tensor = logits[at // length, row]
        return chosen
