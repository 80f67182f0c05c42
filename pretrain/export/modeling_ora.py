"""GPT models with adapters and parts that no class combines, for `trust_remote_code=True`.

Written by ora-pretrain. Starcoder2, Llama (rotary positions) and GPT2 (learned positions), except
for the `parts` of the configuration (norm, mlp, qk_norm, logit_softcap) and for the `corrections`
that it names for a layer, in this order and before any rotation:

    bias       q_h += b_qh, k alike
    taps       k_t ← Σ_j c_j ∘ k_(t−j), v alike         within a text
    head_norm  q_h ← g_q ∘ q_h / rms(q_h), k alike      of all heads, where parts has qk_norm

For taps, transformers' cache holds taps − 1 tokens of keys and values beside its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

EPSILON = 1e-6
PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


class Convolution(nn.Module):
    """`[batch, tokens, channels]` -> Σ_j c_j ∘ x_(t−j), each channel on its own.

    A token at position p looks back at most p tokens: neither into padding nor into another text.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(channels, taps))
        self.place = (0, 0)  # of the state in a cache: layer, number within the layer
        self.cache: Any = None  # cache and positions of the current pass, set by `_begin`
        self.positions: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        cache, positions = self.cache, self.positions
        # A cache kept here would outlive the pass and hold its memory.
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
    """Corrections after a projection, for `[batch, tokens, heads * head_dim]`."""

    def __init__(
        self, sizes: dict[str, int], heads: int, head_dim: int, epsilon: float = EPSILON
    ) -> None:
        super().__init__()
        self.sizes, channels = sizes, heads * head_dim
        if "bias" in sizes:
            self.bias = nn.Parameter(torch.zeros(channels))
        if "taps" in sizes:
            self.convolution = Convolution(channels, sizes["taps"])
        if "head_norm" in sizes:
            self.head_norm = nn.RMSNorm(head_dim, epsilon)

    def forward(self, projected: torch.Tensor) -> torch.Tensor:
        if "bias" in self.sizes:
            projected = projected + self.bias
        if "taps" in self.sizes:
            projected = self.convolution(projected)
        if "head_norm" in self.sizes:
            heads = projected.unflatten(-1, (-1, len(self.head_norm.weight)))
            projected = self.head_norm(heads).flatten(-2)
        return projected


class OraLinear(nn.Linear):
    """A projection to queries, keys or values, followed by its corrections."""

    def __init__(self, inputs: int, corrections: Corrections, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.corrections = corrections

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.corrections(super().forward(hidden_states))


class OraConv1D(Conv1D):
    """GPT2's fused projection [q, k, v], followed by the corrections of each part."""

    def __init__(self, inputs: int, corrections: dict[str, Corrections]) -> None:
        super().__init__(3 * inputs, inputs)
        self.corrections = nn.ModuleDict(corrections)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        parts = zip(
            self.corrections.values(), super().forward(hidden_states).chunk(3, dim=-1), strict=True
        )
        return torch.cat([corrections(part) for corrections, part in parts], dim=-1)


class OraMlp(nn.Module):
    """W_2 a(W_1 x) with GELU or squared ReLU, or W_2 (silu(W_gate x) ∘ W_up x)."""

    def __init__(self, kind: str, make: Callable[[int, int], nn.Module], sizes: Any) -> None:
        super().__init__()
        self.kind = kind
        outer, inner = sizes
        if kind == "swiglu":
            self.gate_proj = make(outer, inner)
            self.up_proj = make(outer, inner)
            self.down_proj = make(inner, outer)
        else:
            self.c_fc = make(outer, inner)
            self.c_proj = make(inner, outer)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.kind == "swiglu":
            gate = nn.functional.silu(self.gate_proj(hidden_states))
            return self.down_proj(gate * self.up_proj(hidden_states))
        inner = self.c_fc(hidden_states)
        if self.kind == "relu2":
            return self.c_proj(nn.functional.relu(inner).square())
        return self.c_proj(nn.functional.gelu(inner))


class OraHead(nn.Linear):
    """Logits c tanh(x / c)."""

    def __init__(self, cap: float, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.cap = cap

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.cap * torch.tanh(super().forward(hidden_states) / self.cap)


def _corrections_of(config: Any, layer: int) -> dict[str, dict[str, int]]:
    """Return the corrections of a layer's queries, keys and values, in this order.

    When transformers saves a configuration again, it sorts the parts by the alphabet.
    """
    corrections = {part: dict(config.corrections[layer][part]) for part in PARTS}
    if getattr(config, "parts", {}).get("qk_norm"):
        for part in ("query", "key"):
            corrections[part]["head_norm"] = 1
    return corrections


def _replace_parts(model: Any, names: Any, sizes: Any, make: Any) -> None:
    """Replace the class's own parts by those that the configuration names.

    Args:
        model: A model with lm_head.
        names: Names of the layers, of the two norms of a layer, and of the last norm.
        sizes: Width of the hidden states, width of the MLP, and the norms' epsilon.
        make: Returns a matrix of the class for its inputs and outputs.
    """
    parts = getattr(model.config, "parts", {})
    body = model.base_model
    layers, first, second, last = names
    width, inner, epsilon = sizes
    for layer in getattr(body, layers):
        if "norm" in parts:
            setattr(layer, first, NORMS[parts["norm"]](width, epsilon))
            setattr(layer, second, NORMS[parts["norm"]](width, epsilon))
        if "mlp" in parts:
            layer.mlp = OraMlp(parts["mlp"], make, (width, inner))
    if "norm" in parts:
        setattr(body, last, NORMS[parts["norm"]](width, epsilon))
    if "logit_softcap" in parts:
        model.lm_head = OraHead(parts["logit_softcap"], width, model.config.vocab_size)


def _connect(body: Any, layers: list[Any]) -> None:
    """Give every convolution, in every pass, the cache, its place there, and the positions."""
    body.register_forward_pre_hook(_number_tokens, with_kwargs=True)
    for attention in layers:
        attention.register_forward_pre_hook(_begin, with_kwargs=True)


def _begin(attention: Any, _: Any, inputs: dict[str, Any]) -> None:
    """Give a layer's convolutions the cache and the positions of the pass that begins."""
    convolutions = [module for module in attention.modules() if isinstance(module, Convolution)]
    cache = inputs.get("past_key_values")
    for number, convolution in enumerate(convolutions):
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


def _make_rotary(model: Any, epsilon: float) -> None:
    """Apply the configuration's corrections and parts to a model of Starcoder2 or Llama."""
    config = model.config
    heads = {"query": config.num_attention_heads}
    for number, layer in enumerate(model.model.layers):
        width = layer.self_attn.head_dim
        for part, sizes_of_part in _corrections_of(config, number).items():
            if sizes_of_part:
                part_heads = heads.get(part, config.num_key_value_heads)
                corrections = Corrections(sizes_of_part, part_heads, width, epsilon)
                linear = OraLinear(config.hidden_size, corrections, part_heads * width)
                setattr(layer.self_attn, PARTS[part], linear)
    names = ("layers", "input_layernorm", "post_attention_layernorm", "norm")
    sizes = (config.hidden_size, config.intermediate_size, epsilon)
    _replace_parts(model, names, sizes, partial(nn.Linear, bias=False))
    _connect(model.model, [layer.self_attn for layer in model.model.layers])
    model.post_init()


class OraRotaryConfig(Starcoder2Config):
    """Configuration of Starcoder2, with `corrections` and `parts`."""

    model_type = "ora_rotary"


class OraRotaryForCausalLM(Starcoder2ForCausalLM):
    """Starcoder2 with corrections and other parts."""

    config_class = OraRotaryConfig

    def __init__(self, config: OraRotaryConfig) -> None:
        super().__init__(config)
        _make_rotary(self, config.norm_epsilon)


class OraLlamaConfig(LlamaConfig):
    """Configuration of Llama, with `corrections` and `parts`."""

    model_type = "ora_llama"


class OraLlamaForCausalLM(LlamaForCausalLM):
    """Llama with corrections and other parts."""

    config_class = OraLlamaConfig

    def __init__(self, config: OraLlamaConfig) -> None:
        super().__init__(config)
        _make_rotary(self, config.rms_norm_eps)


class OraLearnedConfig(GPT2Config):
    """Configuration of GPT2, with `corrections` and `parts`."""

    model_type = "ora_learned"


class OraLearnedForCausalLM(GPT2LMHeadModel):
    """GPT2 with corrections and other parts."""

    config_class = OraLearnedConfig

    def __init__(self, config: OraLearnedConfig) -> None:
        super().__init__(config)
        width, heads, epsilon = config.n_embd, config.n_head, config.layer_norm_epsilon
        block: Any
        for number, block in enumerate(self.transformer.h):
            corrections = {
                part: Corrections(sizes_of_part, heads, width // heads, epsilon)
                for part, sizes_of_part in _corrections_of(config, number).items()
            }
            block.attn.c_attn = OraConv1D(width, corrections)
        sizes = (width, config.n_inner or 4 * width, epsilon)
        _replace_parts(self, ("h", "ln_1", "ln_2", "ln_f"), sizes, _conv1d)
        _connect(self.transformer, [block.attn for block in self.transformer.h])
        self.post_init()


def _conv1d(inputs: int, outputs: int) -> Conv1D:
    return Conv1D(outputs, inputs)
