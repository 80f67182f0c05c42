"""Scaled dot-product attention by PyTorch's fused kernels, as a core attention of megatron-core.

Version-sensitive: has the constructor and the forward that megatron-core's SelfAttention calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.engine.documents import Documents, Visible, attend_within_documents
from megatron_patches.engine.random_streams import own_stream
from megatron_patches.engine.recompute import recomputed_in_backward

QUERIES_AT_A_TIME = 512
"""Queries whose scores are in memory at once while the largest scores are recorded."""


class CausalDotProductAttention(MegatronModule):
    """softmax(q·k/√head_dim + mask) v by `torch.nn.functional.scaled_dot_product_attention`.

    Torch picks the kernel: flash where possible, on the CPU only without dropout. Every variant
    with queries and keys uses this module, so a comparison between two of them never compares two
    attention kernels.

    Args:
        rotary: rotation of queries and keys by their positions; None: they are not rotated.

    Attributes:
        recompute_query_key: function that computes the queries and keys of the next forward pass,
            not rotated, once more. If set, and if attention is causal without a mask, that pass
            saves the function for backward in place of the queries and keys, and clears the
            attribute.
        largest: `[heads of this rank]`, the largest score before the softmax in the training passes
            since it was last filled; None, the initial value: not recorded.
    """

    largest: torch.Tensor | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        rotary: RotaryAngles | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, "this core attention is causal"
        self.scale = (
            softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        )
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.rotary = rotary
        self.recompute_query_key: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Visible,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return the context vectors of causal attention.

        Args:
            query: `[seq, batch, heads, head_dim]` of this rank's heads, not rotated.
            key: `[seq, batch, groups, head_dim]` of this rank's groups, not rotated.
            value: `[seq, batch, groups, head_dim]` of this rank's groups.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a query must not see a key (the
                future included), or documents that stand alone, with their boundaries; None:
                causal.
            attn_mask_type: argument of megatron-core; unused, since the mask says all.
            attention_bias: argument of other core attentions; must be None.
            packed_seq_params: argument of other core attentions; must be None.

        Returns:
            `[seq, batch, heads * head_dim]`.
        """
        assert attention_bias is None and packed_seq_params is None
        # Cleared at once: the function belongs to this pass alone.
        recompute, self.recompute_query_key = self.recompute_query_key, None
        query, key = self.rotated(query, key)
        if self.largest is not None and self.training:
            self._note_largest(query.detach(), key.detach(), attention_mask)
        dropout = self.dropout if self.training else 0.0
        if isinstance(attention_mask, Documents):
            if not (query.device.type == "cpu" and torch.compiler.is_compiling()):
                return self._within_documents(
                    query, key, value=value, documents=attention_mask, dropout=dropout
                )
            # A graph cannot loop over lengths that it does not know.
            attention_mask = attention_mask.mask()
        grouped = query.size(2) != key.size(2)
        if grouped and attention_mask is not None:
            # torch's memory-efficient kernel takes a mask but no groups, and no other saves memory.
            key, value = (
                t.repeat_interleave(query.size(2) // t.size(2), dim=2) for t in (key, value)
            )
            grouped = False
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
        with (
            own_stream(self.config) if dropout > 0.0 else contextlib.nullcontext(),
            self._recomputing(query, key, recompute if attention_mask is None else None),
        ):
            context = scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                attn_mask=None if attention_mask is None else ~attention_mask,
                is_causal=attention_mask is None,
                scale=self.scale,
                enable_gqa=grouped,
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def rotated(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys turned by their positions, where there is a rotation.

        Args:
            query: `[seq, batch, heads, head_dim]`.
            key: `[seq, batch, groups, head_dim]`.
        """
        if self.rotary is None:
            return query, key
        return self.rotary.rotate(query), self.rotary.rotate(key)

    @torch.no_grad()
    def _note_largest(self, query: torch.Tensor, key: torch.Tensor, visible: Visible) -> None:
        """Update `largest` with the scores of a pass, which the fused kernels do not return."""
        assert self.largest is not None
        if isinstance(visible, Documents):
            visible = visible.mask()
        query = query.unflatten(2, (key.size(2), -1))
        for first in range(0, len(query), QUERIES_AT_A_TIME):
            # Causal: keys after the slice's last query cannot matter.
            query_slice = query[first : first + QUERIES_AT_A_TIME]
            end = first + len(query_slice)
            scores = torch.einsum("qbghd,kbgd->bghqk", query_slice, key[:end])
            hidden = torch.ones(len(query_slice), end, dtype=torch.bool, device=query.device)
            hidden = hidden.triu(first + 1)
            if visible is not None:
                hidden = visible[:, :, None, first:end, :end]
            highest = scores.masked_fill(hidden, -math.inf).amax(dim=(0, 3, 4)).flatten()
            self.largest.copy_(torch.maximum(self.largest, highest.float() * self.scale))

    def _recomputing(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        recompute: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that saves `recompute`, if any, for backward instead of its results."""
        if recompute is None:
            return contextlib.nullcontext()
        source = recompute

        def rotated() -> tuple[torch.Tensor, ...]:
            return tuple(heads.permute(1, 2, 0, 3) for heads in self.rotated(*source()))

        return recomputed_in_backward((query, key), rotated)

    def _within_documents(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Documents,
        dropout: float,
    ) -> torch.Tensor:
        length, batch = query.shape[:2]
        query, key, value = (heads.transpose(0, 1).flatten(0, 1) for heads in (query, key, value))
        with own_stream(self.config) if dropout > 0.0 else contextlib.nullcontext():
            context = attend_within_documents(
                query, key, value=value, documents=documents, dropout=dropout, scale=self.scale
            )
        return context.reshape(batch, length, -1).transpose(0, 1).contiguous()
