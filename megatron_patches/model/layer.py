"""The transformer layer: attention and MLP, each behind a norm and added to its input.

Version-sensitive: has the parts of megatron-core's TransformerLayer, the forward that its
TransformerBlock calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_patches.attention.projections import FrozenQueryKeySelfAttention
from megatron_patches.engine.documents import Visible
from megatron_patches.engine.random_streams import (
    has_own_stream,
    own_stream_by_default,
    replicated_mask,
)
from megatron_patches.engine.recompute import recomputed


class Layer(TransformerLayer):
    """megatron-core's TransformerLayer without experts, pipeline stages and inference.

    Attributes:
        recompute: the part whose activations are recomputed in backward instead of kept: `none`,
            `attention` (the attention with its norm) or `full`; see `recompute_in_backward`.
    """

    recompute = "none"

    def recompute_in_backward(self, what: str) -> None:
        """Recompute a part in backward from now on: a value of `recompute`, or `query_key`.

        `query_key` recomputes structured queries and keys only; it changes nothing in other layers.
        """
        self.recompute = what
        if isinstance(self.self_attention, FrozenQueryKeySelfAttention):
            self.self_attention.recomputes_query_key = what == "query_key"

    def compile_parts(self, backend: str) -> None:
        """Run compiled from now on: as one graph, or as one per part if a part is recomputed.

        torch raises an error where a graph would break.
        """
        for name in ("_whole", "_attention_part", "_mlp_part"):
            part = torch.compile(
                getattr(self, name), fullgraph=True, backend=backend, dynamic=False
            )
            setattr(self, name, self._with_random_streams(part))

    def _with_random_streams(
        self, part: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        def run(hidden_states: torch.Tensor, *mask: Visible) -> torch.Tensor:
            drops = self.training and max(self.hidden_dropout, self.config.attention_dropout) > 0.0
            if not (drops and has_own_stream(self.config)):
                return part(hidden_states, *mask)
            with own_stream_by_default(hidden_states.device):
                return part(hidden_states, *mask)

        return run

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Visible = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """Apply attention and MLP, each behind its norm and added to the residual stream.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a position must not see another,
                the future included, or documents that stand alone; None: causal.
            **unused: megatron-core's other arguments, which must be None.

        Returns:
            The hidden states, `[seq(/tp), batch, hidden]`, and None for megatron-core's context.
        """
        assert all(value is None for value in unused.values()), unused.keys()
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        if recompute == "full":
            return recomputed(self._whole, hidden_states, attention_mask), None
        if recompute == "attention":
            return self._mlp_part(
                recomputed(self._attention_part, hidden_states, attention_mask)
            ), None
        return self._whole(hidden_states, attention_mask), None

    # By the class: `compile_parts` replaces the attributes, and this is one graph of both parts.
    def _whole(self, hidden_states: torch.Tensor, attention_mask: Visible) -> torch.Tensor:
        return Layer._mlp_part(self, Layer._attention_part(self, hidden_states, attention_mask))

    def _attention_part(self, hidden_states: torch.Tensor, attention_mask: Visible) -> torch.Tensor:
        attended = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask=attention_mask
        )
        return self._dropped(attended[0]) + hidden_states

    def _mlp_part(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Not by megatron-core's MLP.forward, which would copy the half that is not activated.
        inner, _ = self.mlp.linear_fc1(self.pre_mlp_layernorm(hidden_states))
        fed, _ = self.mlp.linear_fc2(self.config.activation_func(inner))
        return self._dropped(fed) + hidden_states

    def _dropped(self, hidden_states: torch.Tensor) -> torch.Tensor:
        drops = self.training and self.hidden_dropout > 0.0
        # A graph draws from the default generator, which is the rank's own stream meanwhile.
        if drops and torch.compiler.is_compiling() and has_own_stream(self.config):
            keep = 1.0 - self.hidden_dropout
            return hidden_states * replicated_mask(hidden_states, keep) / keep
        return torch.nn.functional.dropout(hidden_states, self.hidden_dropout, self.training)
