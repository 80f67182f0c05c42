"""The transformers class of a run's model, with its config.json and its weights under that class's names.

Models with rotary positions become Starcoder2 without biases, those with learned positions GPT2 with zero
biases. Both classes have LayerNorms with biases before attention and MLP, an MLP of two matrices and the
exact GELU, as megatron-core's layers here. Models with adapters that are not linear become subclasses of
these two, and the file with the subclasses is copied into the export.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.models.gpt import GPTModel

from megatron_patches.bank.orthonormal import ROLES
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.export.projections import Corrections, Part, corrections, corrections_of, rows
from pretrain.export.weight_files import Weight

MODELING_FILE = "modeling_ora.py"
PARTS: tuple[Part, ...] = ("query", "key", "value")


@dataclass(frozen=True)
class Architecture(ABC):
    """A run's model expressed as a class of transformers.

    `corrections`: what the class adds to transformers' own, layer by layer; with any it is a subclass in
    MODELING_FILE.
    """

    config: Config
    corrections: list[Corrections]

    _stock_names: ClassVar[tuple[str, str]]
    """Class and model type."""
    _own_names: ClassVar[tuple[str, str]]
    """Class and model type of the subclass with corrections."""
    _final_norm: ClassVar[str]

    @property
    def custom(self) -> bool:
        """Return whether the class is a subclass in MODELING_FILE."""
        return any(any(layer.values()) for layer in self.corrections)

    @property
    def class_name(self) -> str:
        """Return the class that `AutoModelForCausalLM` loads."""
        return self._own_names[0] if self.custom else self._stock_names[0]

    @property
    def files(self) -> list[Path]:
        """Return the code files to copy into the export; none for a stock class."""
        return [Path(__file__).with_name(MODELING_FILE)] if self.custom else []

    def config_json(self, eod_id: int, dtype: str) -> dict[str, Any]:
        """Return the content of config.json; the end-of-document token also begins a text."""
        names = self._own_names if self.custom else self._stock_names
        values: dict[str, Any] = {"architectures": [names[0]], "model_type": names[1]}
        if self.custom:
            module = MODELING_FILE.removesuffix(".py")
            config_class = names[0].replace("ForCausalLM", "Config")
            values["auto_map"] = {
                "AutoConfig": f"{module}.{config_class}",
                "AutoModelForCausalLM": f"{module}.{names[0]}",
            }
            values["corrections"] = self.corrections
        convolved = [sum("taps" in part for part in layer.values()) for layer in self.corrections]
        if any(
            convolved
        ):  # the cache of such a layer has states of convolutions beside keys and values
            values["layer_types"] = [
                "hybrid" if states else "full_attention" for states in convolved
            ]
            values["number_of_conv_states"] = max(convolved)
        return {
            **values,
            **self._sizes(),
            "vocab_size": self.config.model.vocab_size,
            "tie_word_embeddings": self.config.model.tied_embeddings,
            "initializer_range": self.config.model.init_std,
            "use_cache": True,
            "bos_token_id": eod_id,
            "eos_token_id": eod_id,
            "dtype": dtype,
            "torch_dtype": dtype,  # the same for transformers 4
        }

    def weights(self, model: GPTModel) -> Iterator[Weight]:
        """Yield every tensor of the export, in the order of the model."""
        yield from self._embeddings(model)
        for number, layer in enumerate(model.decoder.layers):
            yield from self._layer(number, layer)
        yield from _norm(self._final_norm, model.decoder.final_layernorm)
        if not self.config.model.tied_embeddings:
            yield self._pieces("lm_head.weight", model.output_layer.weight)

    def row_ranges(self, layer: int, groups: tuple[int, ...]) -> dict[str, list[list[int]]]:
        """Return {tensor: [first, end] of the rows of W (in W x) that are Q or K of these groups}."""
        queries = self.config.model.num_attention_heads // self.config.num_query_groups
        heads = [group * queries + head for group in groups for head in range(queries)]
        policy = self.config.policy
        frozen = ROLES if policy.shared else policy.frozen_row_roles
        by_tensor: dict[str, list[list[int]]] = {}
        for role, numbers in zip(ROLES, (heads, list(groups)), strict=True):
            if role not in frozen:
                continue
            name, places = self._rows_of(layer, role, numbers)
            ranges = by_tensor.setdefault(name, [])
            for place in places:
                first, end = place * self.config.head_dim, (place + 1) * self.config.head_dim
                if ranges and ranges[-1][1] == first:
                    ranges[-1][1] = end
                else:
                    ranges.append([first, end])
        return by_tensor

    def _pieces(self, name: str, weight: torch.Tensor) -> Weight:
        """Return a weight with a row for each piece of the tokenizer, without the rows that fill it up."""
        return _whole(name, weight[: self.config.model.vocab_size])

    @abstractmethod
    def _sizes(self) -> dict[str, Any]: ...

    @abstractmethod
    def _embeddings(self, model: GPTModel) -> Iterator[Weight]: ...

    @abstractmethod
    def _layer(self, number: int, layer: Any) -> Iterator[Weight]: ...

    @abstractmethod
    def _rows_of(self, layer: int, role: str, heads: list[int]) -> tuple[str, list[int]]:
        """Return the tensor that holds these heads of a role, and their places there, counted in heads."""


class Rotary(Architecture):
    """Starcoder2, with rotary positions."""

    _stock_names = ("Starcoder2ForCausalLM", "starcoder2")
    _own_names = ("OraRotaryForCausalLM", "ora_rotary")
    _final_norm = "model.norm"

    def _sizes(self) -> dict[str, Any]:
        model = self.config.model
        base = float(model.rotary_base)
        return {
            "hidden_size": model.hidden_size,
            "intermediate_size": self.config.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": self.config.num_query_groups,
            "head_dim": self.config.head_dim,
            "hidden_act": "gelu",
            "max_position_embeddings": self.config.data.sequence_length,
            "norm_epsilon": model.layernorm_epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": base},
            "rope_theta": base,  # the same for transformers 4
            "sliding_window": None,
            "use_bias": False,
            "attention_dropout": model.dropout,
            "residual_dropout": model.dropout,
            "embedding_dropout": model.dropout,
        }

    def _embeddings(self, model: GPTModel) -> Iterator[Weight]:
        yield self._pieces("model.embed_tokens.weight", model.embedding.word_embeddings.weight)

    def _layer(self, number: int, layer: Any) -> Iterator[Weight]:
        name, attention = f"model.layers.{number}", layer.self_attention
        yield from _norm(f"{name}.input_layernorm", layer.input_layernorm)
        for part in PARTS:
            shape = (self._heads(part) * self.config.head_dim, self.config.model.hidden_size)
            projection = f"{name}.self_attn.{part[0]}_proj"
            yield Weight(f"{projection}.weight", shape, partial(_flat_rows, attention, part))
            wanted = self.corrections[number][part]
            added = corrections(attention, part, wanted, self._heads(part))
            yield from _named(f"{projection}.corrections", added)
        yield _whole(f"{name}.self_attn.o_proj.weight", attention.linear_proj.weight)
        yield from _norm(f"{name}.post_attention_layernorm", layer.pre_mlp_layernorm)
        yield _whole(f"{name}.mlp.c_fc.weight", layer.mlp.linear_fc1.weight)
        yield _whole(f"{name}.mlp.c_proj.weight", layer.mlp.linear_fc2.weight)

    def _heads(self, part: Part) -> int:
        return (
            self.config.model.num_attention_heads
            if part == "query"
            else self.config.num_query_groups
        )

    def _rows_of(self, layer: int, role: str, heads: list[int]) -> tuple[str, list[int]]:
        return f"model.layers.{layer}.self_attn.{role[0]}_proj.weight", heads


class Learned(Architecture):
    """GPT2, with learned positions, transposed matrices, and a key and a value for every query head."""

    _stock_names = ("GPT2LMHeadModel", "gpt2")
    _own_names = ("OraLearnedForCausalLM", "ora_learned")
    _final_norm = "transformer.ln_f"

    def _sizes(self) -> dict[str, Any]:
        model = self.config.model
        return {
            "n_embd": model.hidden_size,
            "n_inner": self.config.ffn_hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_positions": self.config.data.sequence_length,
            "activation_function": "gelu",
            "layer_norm_epsilon": model.layernorm_epsilon,
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.dropout,
        }

    def _embeddings(self, model: GPTModel) -> Iterator[Weight]:
        yield self._pieces("transformer.wte.weight", model.embedding.word_embeddings.weight)
        yield _whole("transformer.wpe.weight", model.embedding.position_embeddings.weight)

    def _layer(self, number: int, layer: Any) -> Iterator[Weight]:
        name, attention = f"transformer.h.{number}", layer.self_attention
        width, inner = self.config.model.hidden_size, self.config.ffn_hidden_size
        heads = self.config.model.num_attention_heads
        yield from _norm(f"{name}.ln_1", layer.input_layernorm)
        yield Weight(
            f"{name}.attn.c_attn.weight",
            (width, 3 * width),
            lambda: torch.cat([_flat_rows(attention, part, heads) for part in PARTS]).t(),
        )
        yield _zeros(f"{name}.attn.c_attn.bias", 3 * width)
        for part in PARTS:
            added = corrections(attention, part, self.corrections[number][part], heads)
            yield from _named(f"{name}.attn.c_attn.corrections.{part}", added)
        yield _transposed(f"{name}.attn.c_proj.weight", attention.linear_proj.weight)
        yield _zeros(f"{name}.attn.c_proj.bias", width)
        yield from _norm(f"{name}.ln_2", layer.pre_mlp_layernorm)
        yield _transposed(f"{name}.mlp.c_fc.weight", layer.mlp.linear_fc1.weight)
        yield _zeros(f"{name}.mlp.c_fc.bias", inner)
        yield _transposed(f"{name}.mlp.c_proj.weight", layer.mlp.linear_fc2.weight)
        yield _zeros(f"{name}.mlp.c_proj.bias", width)

    def _rows_of(self, layer: int, role: str, heads: list[int]) -> tuple[str, list[int]]:
        count = self.config.model.num_attention_heads
        if role == "query":
            places = heads
        else:  # the keys come after the queries, each repeated for its group's
            repeats = count // self.config.num_query_groups
            places = [count + group * repeats + copy for group in heads for copy in range(repeats)]
        return f"transformer.h.{layer}.attn.c_attn.weight", places


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a run's model.

    Raises UserError: no class of transformers computes this model.
    """
    policy = config.policy
    if policy.synthesizer:
        raise UserError(
            f"attention.variant={config.attention.variant} has learned scores in place of queries and keys, "
            "and no class of transformers computes attention so: such a run cannot be exported"
        )
    groups = config.num_query_groups
    added = [
        corrections_of(policy, policy.adapted_groups(frozen, groups))
        for frozen in policy.frozen_groups(config.model.num_layers, groups)
    ]
    if config.model.position_embedding == "rope":
        return Rotary(config, added)
    width = config.model.num_attention_heads * config.head_dim
    if width != config.model.hidden_size:
        raise UserError(
            f"GPT2, the class for learned positions, has heads of hidden_size / num_attention_heads, but "
            f"model.head_dim={config.head_dim} makes {width} of model.hidden_size="
            f"{config.model.hidden_size}: such a run cannot be exported (with rotary positions it could)"
        )
    return Learned(config, added)


def _whole(name: str, weight: torch.Tensor) -> Weight:
    return Weight(name, tuple(weight.shape), lambda: weight)


def _transposed(name: str, weight: torch.Tensor) -> Weight:
    return Weight(name, tuple(weight.t().shape), weight.t)


def _zeros(name: str, size: int) -> Weight:
    make: Callable[[], torch.Tensor] = partial(torch.zeros, size)
    return Weight(name, (size,), make)


def _named(name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[Weight]:
    for own, tensor in tensors.items():
        yield _whole(f"{name}.{own}", tensor)


def _norm(name: str, norm: torch.nn.LayerNorm) -> Iterator[Weight]:
    yield _whole(f"{name}.weight", norm.weight)
    yield _whole(f"{name}.bias", norm.bias)


def _flat_rows(attention: Any, part: Part, heads: int | None = None) -> torch.Tensor:
    """Return rows `[heads * head_dim, hidden]`; a group's rows are repeated for each of its query heads."""
    own = rows(attention, part)
    if heads is not None and len(own) != heads:
        own = own.repeat_interleave(heads // len(own), dim=0)
    return own.flatten(0, 1)
