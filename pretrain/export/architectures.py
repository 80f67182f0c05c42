"""A run's model as a class of transformers: its config.json, and its weights by name.

`names` has the classes: Llama and Qwen3 for RMS norms and SwiGLU; for LayerNorms and GELU,
Starcoder2 without biases, or GPT2 with zero biases where positions are learned. A model with
adapters that rows cannot hold, or with a combination of parts that no class has, becomes a subclass
of one of these, and the file with the subclasses is copied into the export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_patches.bank.orthonormal import ROLES, Role
from megatron_patches.model.gpt import GPT
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.export.names import (
    CLASSES,
    GPT2,
    LLAMA,
    OWN_CODE,
    PARTS,
    STARCODER2,
    ModelClass,
    Part,
    with_parts,
)
from pretrain.export.projections import Corrections, corrections, corrections_of, rows
from pretrain.export.weight_files import Weight, whole


@dataclass(frozen=True)
class Architecture:
    """A run's model expressed as a class of transformers.

    Attributes:
        config: Configuration of the run.
        model_class: The class that computes the model without its adapters.
        parts: Parts that replace those of transformers' class, {norm, mlp, qk_norm, logit_softcap:
            value}.
        corrections: Corrections that follow the projections, layer by layer. A model with parts or
            corrections is a subclass in OWN_CODE.
    """

    config: Config
    model_class: ModelClass
    parts: Mapping[str, Any]
    corrections: list[Corrections]

    @property
    def custom(self) -> bool:
        """Return whether the class is a subclass in OWN_CODE."""
        return bool(self.parts) or any(any(layer.values()) for layer in self.corrections)

    @property
    def class_name(self) -> str:
        """Return the class that `AutoModelForCausalLM` loads."""
        return (self.model_class.adapted if self.custom else self.model_class.stock)[0]

    def config_json(self, eod_id: int, dtype: str) -> dict[str, Any]:
        """Return the content of config.json.

        Args:
            eod_id: Id of the end-of-document token, which also begins a text.
            dtype: Type of the weights, by torch's name.
        """
        values = self._class_settings() | self._positions()
        values |= {**self.model_class.required, **self.model_class.written}
        length = self.config.data.sequence_length
        model_settings = self.config.as_dict()["model"] | {"max_positions": length}
        values |= {
            theirs: model_settings[ours] for ours, theirs in self.model_class.settings.items()
        }
        values |= dict.fromkeys(self.model_class.dropouts, self.config.model.dropout)
        return values | {
            "initializer_range": self.config.model.init_std,
            "use_cache": True,
            "bos_token_id": eod_id,
            "eos_token_id": eod_id,
            "dtype": dtype,
            "torch_dtype": dtype,  # the same for transformers 4
        }

    def _class_settings(self) -> dict[str, Any]:
        """Return the settings that name the class, and those of its adapters."""
        name, model_type = self.model_class.adapted if self.custom else self.model_class.stock
        values: dict[str, Any] = {"architectures": [name], "model_type": model_type}
        if not self.custom:
            return values
        values["auto_map"] = {
            "AutoConfig": f"{OWN_CODE.stem}.{name.replace('ForCausalLM', 'Config')}",
            "AutoModelForCausalLM": f"{OWN_CODE.stem}.{name}",
        }
        values |= {"corrections": self.corrections, "parts": dict(self.parts)}
        convolved = [sum("taps" in part for part in layer.values()) for layer in self.corrections]
        if any(convolved):
            # The cache of such a layer holds states of convolutions beside keys and values.
            kinds = ["hybrid" if states else "full_attention" for states in convolved]
            values |= {"layer_types": kinds, "number_of_conv_states": max(convolved)}
        return values

    def _positions(self) -> dict[str, Any]:
        """Return the settings of rotary positions; for learned ones their number says all."""
        if self.model_class.positions != "rope":
            return {}
        base = float(self.config.model.rotary_base)
        return {
            "max_position_embeddings": self.config.data.sequence_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": base},
            "rope_theta": base,  # the same for transformers 4
        }

    def weights(self, model: GPT) -> Iterator[Weight]:
        """Yield every tensor of the export, in the order of the model."""
        tensors = _own_weights(model)
        count, tied = self.config.model.num_layers, self.config.model.tied_embeddings
        for name, keys in self.model_class.modules(count, tied).items():
            layer, _, part = keys[0].rpartition(".attention.")
            if part in PARTS:
                parts = [role for role in PARTS if f"{layer}.attention.{role}" in keys]
                yield from self._projection(name, model, int(layer.removeprefix("layer.")), parts)
                continue
            key = keys[0]
            if key in ("embedding.word", "output"):
                # One row for each piece of the tokenizer; the rows that pad the embedding stay out.
                yield whole(f"{name}.weight", tensors[key][: self.config.model.vocab_size])
            elif key == "embedding.position":
                yield whole(f"{name}.weight", tensors[key])
            elif key in tensors:
                yield from self._matrix(name, tuple(tensors[key].shape), tensors[key].detach)
            else:  # every parameter of a norm
                for own_key, tensor in tensors.items():
                    if own_key.startswith(f"{key}."):
                        yield whole(f"{name}{own_key.removeprefix(key)}", tensor)

    def row_ranges(
        self, layer: int, groups: Mapping[Role, Sequence[int]]
    ) -> dict[str, list[list[int]]]:
        """Return the rows of W (in W x) that hold Q or K of some key heads of a layer.

        Args:
            layer: Layer number, from 0.
            groups: {role: numbers of the key heads, ascending}.

        Returns:
            {tensor: [first, end] of each range of rows}.
        """
        by_tensor: dict[str, list[list[int]]] = {}
        for role in (role for role in ROLES if groups[role]):
            module, parts = self.model_class.module_of(layer, role)
            ranges = by_tensor.setdefault(f"{module}.weight", [])
            start = sum(self._heads(part) for part in parts[: parts.index(role)])
            # Heads for one key head of the run. GPT2 has a key head for every query head.
            heads = self._heads(role) // self.config.num_query_groups
            for group in groups[role]:
                first = (start + group * heads) * self.config.head_dim
                end = first + heads * self.config.head_dim
                if ranges and ranges[-1][1] == first:
                    ranges[-1][1] = end
                else:
                    ranges.append([first, end])
        return by_tensor

    def _heads(self, part: Part) -> int:
        """Return the number of heads that the class has for a part."""
        grouped = "num_query_groups" in self.model_class.settings
        if part == "query" or not grouped:
            return self.config.model.num_attention_heads
        return self.config.num_query_groups

    def _projection(
        self, name: str, model: GPT, layer: int, parts: Sequence[Part]
    ) -> Iterator[Weight]:
        """Yield the rows of one matrix's parts, and the weights of their adapters."""
        attention = model.decoder.layers[layer].self_attention
        heads = {part: self._heads(part) for part in parts}
        shape = (sum(heads.values()) * self.config.head_dim, self.config.model.hidden_size)
        yield from self._matrix(name, shape, partial(_flat_rows, attention, heads))
        for part in parts:
            added = corrections(attention, part, self.corrections[layer][part], heads[part])
            prefix = f"{name}.corrections" + (f".{part}" if len(parts) > 1 else "")
            for weight_name, tensor in added.items():
                yield whole(f"{prefix}.{weight_name}", tensor)

    def _matrix(
        self, name: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]
    ) -> Iterator[Weight]:
        """Yield a matrix of `shape` `[out, in]` as the class stores it."""
        if not self.model_class.transposed:
            yield Weight(f"{name}.weight", shape, make)
            return
        yield Weight(f"{name}.weight", shape[::-1], lambda: make().t())
        yield Weight(f"{name}.bias", shape[:1], partial(torch.zeros, shape[0]))


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a run's model.

    Raises:
        UserError: no class of transformers computes this model.
    """
    policy = config.policy
    if policy.synthesizer:
        raise UserError(
            f"attention.variant={config.attention.variant} has learned scores in place of queries "
            "and keys, and no class of transformers computes attention so: such a run cannot be "
            "exported"
        )
    groups = config.num_query_groups
    added = [
        corrections_of(policy, policy.adapted_groups(frozen, groups))
        for frozen in policy.frozen_groups(config.model.num_layers, groups)
    ]
    model_class, parts = _class_of(config, any(any(layer.values()) for layer in added))
    width = config.model.num_attention_heads * config.head_dim
    uneven = config.model.hidden_size % config.model.num_attention_heads
    if model_class.stock == LLAMA.stock and uneven:
        raise UserError(
            f"Llama's config.json cannot have model.hidden_size={config.model.hidden_size} with "
            f"model.num_attention_heads={config.model.num_attention_heads}, which does not divide "
            "it: such a run cannot be exported (with model.qk_norm it could, as Qwen3)"
        )
    if "head_dim" not in model_class.settings and width != config.model.hidden_size:
        raise UserError(
            "GPT2, the class for learned positions, has heads of hidden_size / "
            f"num_attention_heads, but model.head_dim={config.head_dim} makes {width} of "
            f"model.hidden_size={config.model.hidden_size}: such a run cannot be exported (with "
            "rotary positions it could)"
        )
    return Architecture(config, model_class, parts, added)


def _class_of(config: Config, corrected: bool) -> tuple[ModelClass, dict[str, Any]]:
    """Return the class with the run's positions, norm and MLP, and the parts that differ from it.

    Args:
        corrected: Whether some layer has corrections.

    Returns:
        A class of transformers and no parts; or the base of a subclass in `modeling_ora`, and the
        parts in which the subclass differs from it.

    Raises:
        UserError: no class has these parts.
    """
    shape, positions = config.shape, config.model.position_embedding
    run_parts: dict[str, Any] = {"norm": shape.norm, "mlp": shape.mlp, "qk_norm": shape.qk_norm}
    softcap = config.model.logit_softcap
    # A correction stands before the norm of queries and keys, which transformers' own classes apply
    # right after the projection: together they need a subclass.
    if softcap is None and not (corrected and shape.qk_norm):
        for model_class in CLASSES.values():
            if model_class.positions == positions and model_class.parts == run_parts:
                return model_class, {}
    bases = [STARCODER2, LLAMA] if positions == "rope" else [GPT2]
    alike = [base for base in bases if base.parts == run_parts | {"qk_norm": False}]
    base = (alike or bases)[-1]
    try:
        model_class = with_parts(base, **run_parts)
    except KeyError as error:
        raise UserError(
            f"neither a class of transformers nor modeling_ora.py has the part {error}: such a run "
            "cannot be exported"
        ) from None
    parts = {key: value for key, value in run_parts.items() if value != base.parts[key]}
    return model_class, parts | ({} if softcap is None else {"logit_softcap": softcap})


def _own_weights(model: GPT) -> dict[str, torch.Tensor]:
    """Return {key of initial values: weight} of a live model on one rank, fused weights split."""
    live = dict(model.named_parameters())
    weights: dict[str, torch.Tensor] = {}
    for tensor in model.inventory:
        if tensor.trains and tensor.repeats is None:
            parts = live[tensor.name].split([length for _, length in tensor.parts])
            weights |= {key: part for (key, _), part in zip(tensor.parts, parts, strict=True)}
    return weights


def _flat_rows(attention: Any, heads: Mapping[Part, int]) -> torch.Tensor:
    """Return rows `[heads * head_dim, hidden]` of some parts, repeated to that many heads."""
    parts = []
    for part, count in heads.items():
        part_rows = rows(attention, part)
        if len(part_rows) != count:
            part_rows = part_rows.repeat_interleave(count // len(part_rows), dim=0)
        parts.append(part_rows.flatten(0, 1))
    return torch.cat(parts)
