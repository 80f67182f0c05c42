"""The transformer layer: attention and MLP, each behind a norm and added to its input.

Version-sensitive: has the parts of megatron-core 0.16's TransformerLayer, and the forward that its
TransformerBlock calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_patches.attention.projections import FrozenQueryKeySelfAttention
from megatron_patches.engine.documents import Visible
from megatron_patches.engine.random_streams import has_own_stream, own_stream_by_default, replicated_mask
from megatron_patches.engine.recompute import recomputed


class Layer(TransformerLayer):
    """megatron-core's layer without what a GPT without experts, pipelines and inference does not use.

    Attributes:
        recompute: what is made again in backward instead of being kept: `none`, `attention` (the attention
            with its norm) or `full`; see `recompute_in_backward`.
    """

    recompute = "none"

    def recompute_in_backward(self, what: str) -> None:
        """From now on make `what` again: one of the above, or `query_key`, structured queries and keys."""
        self.recompute = what
        if isinstance(self.self_attention, FrozenQueryKeySelfAttention):
            self.self_attention.recomputes_query_key = what == "query_key"

    def compile_parts(self, backend: str) -> None:
        """From now on run compiled: as one graph, or where something is recomputed as one for each part.

        A graph that breaks is an error.
        """
        for name in ("_whole", "_attention_part", "_mlp_part"):
            part = torch.compile(getattr(self, name), fullgraph=True, backend=backend, dynamic=False)
            setattr(self, name, self._in_its_streams(part))

    def _in_its_streams(self, part: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(hidden_states: torch.Tensor, *mask: Visible) -> torch.Tensor:
            drops = self.training and max(self.hidden_dropout, self.config.attention_dropout) > 0.0
            if not (drops and has_own_stream(self.config)):
                return part(hidden_states, *mask)
            with own_stream_by_default(hidden_states.device):
                return part(hidden_states, *mask)

        return run

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Visible = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
        rotary_pos_cos_sin: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """`[seq(/tp), batch, hidden]` -> the same shape, and no context.

        Args:
            attention_mask: as the core attention takes it. What follows it is megatron-core's, and unused.
        """
        assert context is None and rotary_pos_emb is None and attention_bias is None
        assert inference_context is None and packed_seq_params is None and padding_mask is None
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        if recompute == "full":
            return recomputed(self._whole, hidden_states, attention_mask), None
        if recompute == "attention":
            return self._mlp_part(recomputed(self._attention_part, hidden_states, attention_mask)), None
        return self._whole(hidden_states, attention_mask), None

    def _whole(self, hidden_states: torch.Tensor, attention_mask: Visible) -> torch.Tensor:
        return Layer._mlp_part(self, Layer._attention_part(self, hidden_states, attention_mask))

    def _attention_part(self, hidden_states: torch.Tensor, attention_mask: Visible) -> torch.Tensor:
        attended = self.self_attention(self.input_layernorm(hidden_states), attention_mask=attention_mask)
        return self._dropped(attended[0]) + hidden_states

    def _mlp_part(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fed = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return self._dropped(fed[0]) + hidden_states

    def _dropped(self, hidden_states: torch.Tensor) -> torch.Tensor:
        drops = self.training and self.hidden_dropout > 0.0
        if drops and torch.compiler.is_compiling() and has_own_stream(self.config):
            keep = 1.0 - self.hidden_dropout
            return hidden_states * replicated_mask(hidden_states, keep) / keep
        return torch.nn.functional.dropout(hidden_states, self.hidden_dropout, self.training)
