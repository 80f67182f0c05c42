"""GPT models with adapters of queries, keys and values, for `trust_remote_code=True`.

Written by ora-pretrain. Starcoder2 (rotary positions) and GPT2 (learned positions) as they are, but
for the corrections that the configuration names for a layer, in this order and before any rotation:

    bias    q_h += b_qh, k alike
    norm    q_h ← g_qh ∘ q_h / rms(q_h), k alike     of the heads that have one
    taps    k_t ← Σ_j c_j ∘ k_(t−j), v alike         within a text

For the last, transformers' cache holds taps − 1 tokens of keys and values beside its own.
"""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Starcoder2Config, Starcoder2ForCausalLM
from transformers.pytorch_utils import Conv1D

EPSILON = 1e-6
PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


class HeadNorm(nn.Module):
    """RMS norm of the vectors of those heads that have one, `[..., heads * head_dim]`."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape = (heads, head_dim)
        self.gain = nn.Parameter(torch.ones(heads * head_dim))
        # 1 where a head has the norm, 0 where it has not; saved, because it is part of the model.
        self.normed = nn.Parameter(torch.ones(heads), requires_grad=False)

    def forward(self, projected: torch.Tensor) -> torch.Tensor:
        vectors = projected.unflatten(-1, self.shape)
        normalised = nn.functional.rms_norm(vectors.float(), vectors.shape[-1:], eps=EPSILON)
        corrected = normalised.type_as(vectors) * self.gain.view(self.shape)
        return torch.where(self.normed[:, None] > 0, corrected, vectors).flatten(-2)


class Convolution(nn.Module):
    """`[batch, tokens, channels]` -> Σ_j c_j ∘ x_(t−j), each channel by itself.

    A token at position p looks back p tokens at most: not into padding, nor into another text.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(channels, taps))
        self.place = (0, 0)  # of the state in a cache: layer, number within the layer
        self.cache: Any = None  # these two of the pass in progress: see `_begin`
        self.positions: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        cache, positions = self.cache, self.positions
        self.cache = self.positions = None
        earlier = self.taps.size(1) - 1
        tokens = inputs.size(1)
        states = inputs.transpose(1, 2)
        if cache is not None:
            states = cache.update_conv_state(states, *self.place, conv_kernel_size=earlier)
        states = nn.functional.pad(states, (earlier, 0))[..., -earlier - tokens :].transpose(1, 2)
        outputs = inputs * self.taps[:, 0]
        for back in range(1, earlier + 1):
            seen = positions.to(inputs.device).unsqueeze(-1) >= back
            outputs = outputs + states[:, earlier - back :][:, :tokens] * seen * self.taps[:, back]
        return outputs


class Corrections(nn.Module):
    """Corrections after a projection, of `[batch, tokens, heads * head_dim]`."""

    def __init__(self, wanted: dict[str, int], heads: int, head_dim: int) -> None:
        super().__init__()
        self.wanted, channels = wanted, heads * head_dim
        if "bias" in wanted:
            self.bias = nn.Parameter(torch.zeros(channels))
        if "norm" in wanted:
            self.norm = HeadNorm(heads, head_dim)
        if "taps" in wanted:
            self.convolution = Convolution(channels, wanted["taps"])

    def forward(self, projected: torch.Tensor) -> torch.Tensor:
        if "bias" in self.wanted:
            projected = projected + self.bias
        if "norm" in self.wanted:
            projected = self.norm(projected)
        return self.convolution(projected) if "taps" in self.wanted else projected


class OraLinear(nn.Linear):
    """A projection to queries, keys or values, and its corrections."""

    def __init__(self, wanted: dict[str, int], inputs: int, heads: int, head_dim: int) -> None:
        super().__init__(inputs, heads * head_dim, bias=False)
        self.corrections = Corrections(wanted, heads, head_dim)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.corrections(super().forward(hidden_states))


class OraConv1D(Conv1D):
    """GPT2's fused projection [q, k, v], and the corrections of each."""

    def __init__(self, wanted: dict[str, dict[str, int]], inputs: int, heads: int) -> None:
        super().__init__(3 * inputs, inputs)
        corrections = {part: Corrections(wanted[part], heads, inputs // heads) for part in PARTS}
        self.corrections = nn.ModuleDict(corrections)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        parts = zip(
            self.corrections.values(), super().forward(hidden_states).chunk(3, dim=-1), strict=True
        )
        return torch.cat([corrections(part) for corrections, part in parts], dim=-1)


def _connect(body: Any, layers: list[Any]) -> None:
    """Give each convolution in every pass the cache, its place there, and the tokens' positions."""
    body.register_forward_pre_hook(_number_tokens, with_kwargs=True)
    for attention in layers:
        attention.register_forward_pre_hook(_begin, with_kwargs=True)


def _begin(attention: Any, _: Any, inputs: dict[str, Any]) -> None:
    """Give a layer's convolutions what its pass begins with."""
    found = [module for module in attention.modules() if isinstance(module, Convolution)]
    cache = inputs.get("past_key_values")
    for number, convolution in enumerate(found):
        if cache is not None and len(cache.layers) <= attention.layer_idx:
            raise ValueError(
                "the cache has no place for convolutions: DynamicCache(config=model.config) has"
            )
        convolution.place = (attention.layer_idx, number)
        convolution.cache, convolution.positions = cache, inputs["position_ids"]


def _number_tokens(_: Any, args: Any, inputs: dict[str, Any]) -> Any:
    """Count positions from the beginning of each padded text, as `generate` does."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, dict):  # of a static cache, by kind of layer
        inputs["attention_mask"] = mask["full_attention"]
    elif isinstance(mask, torch.Tensor) and mask.dim() == 2 and inputs.get("position_ids") is None:
        ids = args[0] if args else inputs.get("input_ids")
        tokens = (inputs["inputs_embeds"] if ids is None else ids).size(1)
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
    return args, inputs


class OraRotaryConfig(Starcoder2Config):
    """Configuration of Starcoder2, with `corrections`."""

    model_type = "ora_rotary"


class OraRotaryForCausalLM(Starcoder2ForCausalLM):
    """Starcoder2 with corrections."""

    config_class = OraRotaryConfig

    def __init__(self, config: OraRotaryConfig) -> None:
        super().__init__(config)
        queries, groups = config.num_attention_heads, config.num_key_value_heads
        for layer, corrections in zip(self.model.layers, config.corrections, strict=True):
            attention = layer.self_attn
            for part, wanted in corrections.items():
                if wanted:
                    heads = queries if part == "query" else groups
                    made = OraLinear(wanted, config.hidden_size, heads, attention.head_dim)
                    setattr(attention, PARTS[part], made)
        _connect(self.model, [layer.self_attn for layer in self.model.layers])
        self.post_init()


class OraLearnedConfig(GPT2Config):
    """Configuration of GPT2, with `corrections`."""

    model_type = "ora_learned"


class OraLearnedForCausalLM(GPT2LMHeadModel):
    """GPT2 with corrections."""

    config_class = OraLearnedConfig

    def __init__(self, config: OraLearnedConfig) -> None:
        super().__init__(config)
        block: Any
        for block, corrections in zip(self.transformer.h, config.corrections, strict=True):
            block.attn.c_attn = OraConv1D(corrections, config.n_embd, config.n_head)
        _connect(self.transformer, [block.attn for block in self.transformer.h])
        self.post_init()
