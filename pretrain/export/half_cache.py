"""Decoding with half of the cache: keys alone, where W_K is a rotation of the layer's input.

Orthonormal rows over a whole layer (`scope: layer`) with as many key heads as query heads make W_K square and
W_Kᵀ W_K = 1. So keys hold all that values are made of: v_t = W_V x_t = W_V W_Kᵀ k_t, and a head's output is

    Σ_t p_t v_t = (W_V W_Kᵀ) Σ_t p_t k_t

with the key of all heads on the right. The cache holds keys as they are before the rotary positions, and
they are rotated when they are read. arXiv 2503.05840 inverts trained square matrices for it; here the inverse
is the transpose, exact up to rounding. The price is arithmetic: the last sum is over hidden_size numbers a
head instead of head_dim, so as many times the work as there are heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pretrain.errors import UserError

LARGEST_DEVIATION = 1e-5
"""Largest difference of an element of W_K W_Kᵀ from the identity: of fp32, not of rows rounded to bf16."""


class HalfCacheAttention(nn.Module):
    """Starcoder2's attention without biases, whose cache holds keys alone.

    Every text of a batch begins at position 0: without padding on the left. `attention`: the layer's own
    module; its projections are shared. `rotary`: the model's rotary embedding.
    """

    def __init__(self, attention: Any, rotary: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.layer_idx, self.head_dim = (
            attention.o_proj,
            attention.layer_idx,
            attention.head_dim,
        )
        self.rotary = [rotary]  # in a list: a part of the model, not of this layer
        key = self.k_proj.weight.double()
        value = (self.v_proj.weight.double() @ key.T).type_as(self.v_proj.weight)
        self.register_buffer(
            "value_of_keys", value.unflatten(0, (-1, self.head_dim)), persistent=False
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return `[batch, tokens, hidden]` for transformers' layer; attends to all tokens before."""
        from transformers.models.starcoder2.modeling_starcoder2 import apply_rotary_pos_emb

        query, keys = (self._heads(proj(hidden_states)) for proj in (self.q_proj, self.k_proj))
        if past_key_values is not None:
            keys, _ = past_key_values.update(keys, keys[..., :0], self.layer_idx)
        tokens, length = query.size(2), keys.size(2)
        places = torch.arange(length, device=keys.device)
        cosines, sines = self.rotary[0](keys, places[None])
        query, _ = apply_rotary_pos_emb(query, query, cosines[:, -tokens:], sines[:, -tokens:])
        rotated, _ = apply_rotary_pos_emb(keys, keys, cosines, sines)
        if tokens == length:
            values = self._heads(self.v_proj(hidden_states))
            mixed = nn.functional.scaled_dot_product_attention(
                query, rotated, values, is_causal=True
            )
        else:
            scores = query @ rotated.transpose(2, 3) * self.head_dim**-0.5
            later = places > places[-tokens:, None]
            weights = scores.float().masked_fill(later, -torch.inf).softmax(-1).type_as(query)
            of_keys = torch.einsum("bhnt,bgtv->bhngv", weights, keys).flatten(3)
            mixed = torch.einsum("bhnd,hvd->bhnv", of_keys, self.value_of_keys)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, hidden]` -> `[batch, heads, tokens, head_dim]`."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def halve_cache(model: Any) -> None:
    """Let an exported model decode with a cache of keys alone.

    Raises UserError: a layer's keys do not determine its values.
    """
    layers = model.model.layers if type(model).__name__ == "Starcoder2ForCausalLM" else []
    if not layers:
        raise UserError(
            f"--half-cache: {type(model).__name__} has learned positions, or convolutions, norms or biases "
            "of queries, keys or values; only models with rotary positions and without these can"
        )
    for number, layer in enumerate(layers):
        key = layer.self_attn.k_proj.weight.double()
        square, identity = key.size(0) == key.size(1), torch.eye(len(key)).to(key)
        if not square or (key @ key.T - identity).abs().max() > LARGEST_DEVIATION:
            raise UserError(
                f"--half-cache: W_K of layer {number} is not a rotation of the layer's input, so values "
                "cannot be made of keys; frozen rows with attention.scope=layer and as many key as query "
                "heads are, as in the variant monarch, in fp32"
            )
    for layer in layers:
        layer.self_attn = HalfCacheAttention(layer.self_attn, model.model.rotary_emb)


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a transformers cache's keys and values."""
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
