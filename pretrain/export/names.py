"""Classes of transformers for models of this program: names of weights and settings.

Every name is written once: `architectures` reads the tables from left to right (export),
`source_model` from right to left (import). A weight's own name is the key of its initial values,
see `megatron_patches.model.initialize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

OWN_CODE = Path(__file__).with_name("modeling_ora.py")
"""File that is copied into an export of a model that no class of transformers computes."""

Part = Literal["query", "key", "value"]
PARTS: tuple[Part, ...] = ("query", "key", "value")


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers that computes models of this program.

    Attributes:
        stock: Class and model type.
        adapted: Class and model type of its subclass in `modeling_ora`, for adapters or other
            parts.
        positions: Value of model.position_embedding.
        norm: Name of the norm in `megatron_patches.recipe.parts`.
        mlp: Name of the MLP, likewise.
        qk_norm: Whether the class normalises queries and keys, as model.qk_norm does.
        embeddings: {key: module} ahead of the layers.
        layers: Module that holds the layers by number.
        layer: {key within a layer: module within it}; keys of one module share a fused matrix.
        last_norm: {key: module} behind the layers.
        settings: {key of the section `model`: key of config.json}. A class without
            num_query_groups has a key and a value for every query head; one without head_dim has
            heads of hidden_size / num_attention_heads.
        required: Settings of config.json that must have this value.
        written: Settings of config.json that an export writes; an import reads the tensors instead.
        dropouts: Keys of config.json for model.dropout.
        transposed: Whether matrices are stored `[in, out]`, with biases, which are zero.
    """

    stock: tuple[str, str]
    adapted: tuple[str, str]
    positions: Literal["rope", "learned"]
    norm: str
    mlp: str
    embeddings: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    last_norm: Mapping[str, str]
    settings: Mapping[str, str]
    required: Mapping[str, Any]
    dropouts: tuple[str, ...]
    written: Mapping[str, Any] = field(default_factory=dict)
    qk_norm: bool = False
    transposed: bool = False

    @property
    def parts(self) -> dict[str, Any]:
        """Return {norm, mlp, qk_norm: value}, as the keys of the section `model`."""
        return {"norm": self.norm, "mlp": self.mlp, "qk_norm": self.qk_norm}

    def modules(self, num_layers: int, tied: bool) -> dict[str, list[str]]:
        """Return the modules of the whole model, in the order of its computation.

        Args:
            tied: Whether input and output embeddings are one matrix.

        Returns:
            {module: keys of its rows, from the first row to the last}.
        """
        names = dict(self.embeddings)
        for number in range(num_layers):
            for key, module in self.layer.items():
                names[f"layer.{number}.{key}"] = f"{self.layers}.{number}.{module}"
        names |= self.last_norm
        if not tied:
            names["output"] = "lm_head"
        modules: dict[str, list[str]] = {}
        for key, module in names.items():
            modules.setdefault(module, []).append(key)
        return modules

    def module_of(self, layer: int, part: Part) -> tuple[str, tuple[Part, ...]]:
        """Return the module with a part of a layer's projections, and all parts of that module."""
        module = self.layer[f"attention.{part}"]
        parts = tuple(name for name in PARTS if self.layer[f"attention.{name}"] == module)
        return f"{self.layers}.{layer}.{module}", parts


_MLPS: dict[str, dict[str, str]] = {
    "gelu": {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"},
    "relu2": {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"},
    "swiglu": {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
}
"""{MLP: {key within a layer: module within it}}, the same in every class."""
_ROTARY_ATTENTION = {
    "norm1": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.proj": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
}

STARCODER2 = ModelClass(
    stock=("Starcoder2ForCausalLM", "starcoder2"),
    adapted=("OraRotaryForCausalLM", "ora_rotary"),
    positions="rope",
    norm="layernorm",
    mlp="gelu",
    embeddings={"embedding.word": "model.embed_tokens"},
    layers="model.layers",
    layer=_ROTARY_ATTENTION | _MLPS["gelu"],
    last_norm={"norm": "model.norm"},
    settings={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn_hidden_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "layernorm_epsilon": "norm_epsilon",
        "tied_embeddings": "tie_word_embeddings",
    },
    required={"hidden_act": "gelu", "sliding_window": None},
    dropouts=("attention_dropout", "residual_dropout", "embedding_dropout"),
    written={"use_bias": False},
)

LLAMA = ModelClass(
    stock=("LlamaForCausalLM", "llama"),
    adapted=("OraLlamaForCausalLM", "ora_llama"),
    positions="rope",
    norm="rmsnorm",
    mlp="swiglu",
    embeddings=STARCODER2.embeddings,
    layers="model.layers",
    layer=_ROTARY_ATTENTION | _MLPS["swiglu"],
    last_norm=STARCODER2.last_norm,
    settings={**STARCODER2.settings, "layernorm_epsilon": "rms_norm_eps"},
    required={"hidden_act": "silu"},
    dropouts=("attention_dropout",),
    written={"attention_bias": False, "mlp_bias": False},
)

QWEN3 = replace(
    LLAMA,
    stock=("Qwen3ForCausalLM", "qwen3"),
    qk_norm=True,
    layer={
        **LLAMA.layer,
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
    },
    required={"hidden_act": "silu", "use_sliding_window": False},
    written={"attention_bias": False},
)

GPT2 = ModelClass(
    stock=("GPT2LMHeadModel", "gpt2"),
    adapted=("OraLearnedForCausalLM", "ora_learned"),
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    embeddings={"embedding.word": "transformer.wte", "embedding.position": "transformer.wpe"},
    layers="transformer.h",
    layer={
        "norm1": "ln_1",
        "attention.query": "attn.c_attn",
        "attention.key": "attn.c_attn",
        "attention.value": "attn.c_attn",
        "attention.proj": "attn.c_proj",
        "norm2": "ln_2",
        **_MLPS["gelu"],
    },
    last_norm={"norm": "transformer.ln_f"},
    settings={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "layernorm_epsilon": "layer_norm_epsilon",
        "tied_embeddings": "tie_word_embeddings",
    },
    required={
        "activation_function": "gelu",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    transposed=True,
)

_NORMS = ("layernorm", "rmsnorm")


def with_parts(base: ModelClass, norm: str, mlp: str, qk_norm: bool) -> ModelClass:
    """Return a subclass of `modeling_ora`: the base's names with other parts.

    Raises:
        KeyError: `modeling_ora` has no such norm or MLP.
    """
    if norm not in _NORMS:
        raise KeyError(norm)
    layer = {key: name for key, name in base.layer.items() if not key.startswith("mlp.")}
    layer |= _MLPS[mlp]
    for role in ("query", "key") if qk_norm else ():
        part = f".{role}" if base.transposed else ""  # GPT2 has one matrix for all three
        name = f"{layer[f'attention.{role}']}.corrections{part}.head_norm"
        layer[f"attention.{role}_norm"] = name
    return replace(base, norm=norm, mlp=mlp, qk_norm=qk_norm, layer=layer)


CLASSES: Mapping[str, ModelClass] = MappingProxyType(
    {model_class.stock[1]: model_class for model_class in (STARCODER2, GPT2, LLAMA, QWEN3)}
)
"""{model type: class}."""
