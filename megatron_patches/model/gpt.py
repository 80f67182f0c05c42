"""megatron-core's GPTModel with an output layer that computes the loss.

Version-sensitive: relies on the parts of megatron-core's GPTModel and on the work of its constructor.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_patches.engine.documents import Documents, Visible
from megatron_patches.model.output import CrossEntropy, OutputLayer
from megatron_patches.recipe.parts import Tensor


class GPT(GPTModel):
    """GPTModel with our `OutputLayer`; names and shapes of parameters are GPTModel's.

    Args:
        pieces: of the tokenizer: what an embedding of `vocab_size` rows has beyond them is never predicted.
        cross_entropy: the form of the cross-entropy: see `output`.
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
        flash_documents: bool,
        inventory: tuple[Tensor, ...],
    ) -> None:
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
        )
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
            input_ids, position_ids: `[batch, seq]`.
            labels: `[batch, seq]`.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a query must not see a key (the future
                included), or documents that stand alone; None: causal.
            at: `[batch]`, a position of each row; with it only the logits there, `[batch, vocabulary/tp]`.
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
        """Return logits `[batch, vocabulary/tp]` at a position of each row of `[seq(/tp), batch, hidden]`."""
        length, row = hidden_states.size(0), torch.arange(at.size(0), device=at.device)
        # With sequence parallelism the output layer joins one position of every rank's part, and one of these
        # is the position asked for.
        logits, _ = self.output_layer(hidden_states[at % length, row][None], weight=weight)
        chosen: torch.Tensor = logits[at // length, row]
        return chosen
