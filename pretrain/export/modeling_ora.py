"""GPT models with RMS-normalised queries and keys, for `trust_remote_code=True`. Written by ora-pretrain.

Starcoder2 (rotary positions) and GPT2 (learned positions) as they are, but for the norm: of the heads that
have one, q_h ← g_qh ∘ q_h / rms(q_h) before any rotation, and k alike.
"""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Starcoder2Config, Starcoder2ForCausalLM
from transformers.pytorch_utils import Conv1D

EPSILON = 1e-6


class HeadNorm(nn.Module):
    """`[..., heads * head_dim]` -> the same, with the vectors of heads that have a norm normalised."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape = (heads, head_dim)
        self.gain = nn.Parameter(torch.ones(heads, head_dim))
        # 1 where a head has the norm, 0 where it has not; saved, because it is part of the model.
        self.normed = nn.Parameter(torch.ones(heads, 1), requires_grad=False)

    def forward(self, projected: torch.Tensor) -> torch.Tensor:
        vectors = projected.unflatten(-1, self.shape)
        normalised = nn.functional.rms_norm(vectors.float(), vectors.shape[-1:], eps=EPSILON)
        corrected = normalised.type_as(vectors) * self.gain
        return torch.where(self.normed > 0, corrected, vectors).flatten(-2)


class NormedLinear(nn.Linear):
    """A projection to queries or keys, and their norm."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.norm = HeadNorm(heads, outputs // heads)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(hidden_states))


class NormedConv1D(Conv1D):
    """GPT2's fused projection [q, k, v], and the norm of its queries and keys."""

    def __init__(self, outputs: int, inputs: int, heads: int) -> None:
        super().__init__(outputs, inputs)
        self.query_norm = HeadNorm(heads, inputs // heads)
        self.key_norm = HeadNorm(heads, inputs // heads)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query, key, value = super().forward(hidden_states).chunk(3, dim=-1)
        return torch.cat((self.query_norm(query), self.key_norm(key), value), dim=-1)


class OraRotaryConfig(Starcoder2Config):
    model_type = "ora_rotary"


class OraRotaryForCausalLM(Starcoder2ForCausalLM):
    config_class = OraRotaryConfig

    def __init__(self, config: OraRotaryConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            attention = layer.self_attn
            for name, heads in (
                ("q_proj", config.num_attention_heads),
                ("k_proj", config.num_key_value_heads),
            ):
                plain = getattr(attention, name)
                setattr(attention, name, NormedLinear(plain.in_features, plain.out_features, heads))
        self.post_init()


class OraLearnedConfig(GPT2Config):
    model_type = "ora_learned"


class OraLearnedForCausalLM(GPT2LMHeadModel):
    config_class = OraLearnedConfig

    def __init__(self, config: OraLearnedConfig) -> None:
        super().__init__(config)
        block: Any
        for block in self.transformer.h:
            width = config.n_embd
            block.attn.c_attn = NormedConv1D(3 * width, width, config.n_head)
        self.post_init()
