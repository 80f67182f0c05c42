"""Import of a Hugging Face directory as the initial weights of a run: `python -m pretrain import`.

OUT/weights.safetensors   every weight, under the name of its random stream at initialisation
OUT/config.yaml           a configuration of the same model, with these initial weights

Starcoder2 and GPT2 without biases are read, the inverse of `architectures`. A directory whose model computes
anything else (biases that are not zero, another activation, scaled rotation) is refused, naming the first
difference.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open

from megatron_patches.bank.initial_weights_file import FORMAT, bank_name, head_digest
from megatron_patches.bank.orthonormal import ROLES
from megatron_patches.recipe.policy import ORDINARY, VARIANTS
from megatron_patches.recipe.tensors import ModelShape, tensors, weight_shapes
from pretrain.config.load import load_config
from pretrain.config.sources import dump_yaml, override_text
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.export.directories import made_beside, refuse_existing
from pretrain.export.weight_files import Weight, write_weights
from pretrain.runs.directory import write_text_atomically

WEIGHTS, CONFIG = "weights.safetensors", "config.yaml"
MUST_BE: dict[str, dict[str, Any]] = {
    "starcoder2": {"hidden_act": "gelu", "sliding_window": None},
    "gpt2": {
        "activation_function": "gelu",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
"""Settings that must have this value, which is the class's default where DEFAULTS names no other."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "starcoder2": {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.018042,
        "residual_dropout": 0.0,
        "rope_theta": 10000.0,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "resid_pdrop": 0.1,
        "n_inner": None,
    },
}
_COMPUTE_NOTHING = re.compile(r"(.+\.)?attn\.(masked_)?bias|.+\.rotary_emb\.inv_freq|lm_head\.weight")
"""Tensors of older files that may be left unread: causal masks, frequencies, a tied output layer."""
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number above 0": lambda value: type(value) is int and value > 0,
    "a number above 0": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "true or false": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
}


class StoredTensors:
    """The tensors of a directory's safetensors files, one or several, read one at a time.

    Attributes:
        used: types, by name, of the tensors that a model has looked for.

    Raises:
        UserError: there is no safetensors file, or one cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.used: dict[str, str] = {}
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = json.loads(index.read_text())["weight_map"]
                # Beside the index, whatever place it names.
                self._files = {name: directory / Path(file).name for name, file in names.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index} cannot be read ({error}); restore it") from error
            return
        file = directory / "model.safetensors"
        if not file.is_file():
            raise UserError(f"{directory} has no model.safetensors; convert its weights to safetensors first")
        with self._open(file) as opened:
            self._files = dict.fromkeys(opened.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor. Raises UserError: there is none of this name, or it holds NaN or infinity."""
        with self._open(self._file(name)) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if not torch.isfinite(tensor).all():
            raise UserError(f"{self.directory}: {name} holds NaN or infinity: it cannot be imported")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises UserError: there is no tensor of this name."""
        with self._open(self._file(name)) as file:
            stored = file.get_slice(name)
            self.used[name] = stored.get_dtype()
            return tuple(stored.get_shape())

    def dtype(self) -> torch.dtype:
        """Return a type that holds all used tensors exactly: bf16 if each is stored in bf16, else fp32.

        Raises:
            UserError: a tensor is of another type than fp32, bf16 and fp16.
        """
        for name, kind in self.used.items():
            if kind not in ("F32", "BF16", "F16"):
                raise UserError(
                    f"{self.directory}: {name} is of type {kind}; only fp32, bf16 and fp16 can be imported"
                )
        return torch.bfloat16 if set(self.used.values()) == {"BF16"} else torch.float32

    def _file(self, name: str) -> Path:
        if name not in self._files:
            raise UserError(f"{self.directory} has no weight {name}")
        return self._files[name]

    @contextmanager
    def _open(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error


@dataclass(frozen=True)
class SourceModel(ABC):
    """A model directory of one transformers class.

    Attributes:
        settings: content of its config.json, with the class's defaults.
    """

    directory: Path
    settings: dict[str, Any]
    tensors: StoredTensors

    bias_endings: ClassVar[tuple[str, ...]]
    """Endings of the names of biases that must be zero or absent."""

    @cached_property
    @abstractmethod
    def model(self) -> dict[str, Any]:
        """Return the section `model` of the configuration, and `max_positions` if positions are learned."""

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """Yield every weight under the name of its stream (see `megatron_patches.model.initialize`)."""

    def check_the_rest(self) -> None:
        """Check, after the shapes, that tensors without a place here change nothing.

        Raises:
            UserError: a bias is not zero, or a tensor is of something else (unmerged LoRA, say).
        """
        for name in sorted(set(self.tensors.names()) - self.tensors.used.keys()):
            if name.endswith(self.bias_endings):
                if torch.any(self.tensors.read(name)):
                    raise UserError(
                        f"{self.directory}: {name} is not zero, and layers here have no such bias: it cannot "
                        "be imported"
                    )
            elif not _COMPUTE_NOTHING.fullmatch(name):
                raise UserError(
                    f"{self.directory}: {name} has no place in the model here, and without it the model is "
                    "another one: it cannot be imported"
                )

    def check_shapes(self) -> None:
        """Raises UserError: a weight is not there, or has another shape than config.json makes it."""
        model = self.model
        sizes = {field.name: model[field.name] for field in fields(ModelShape) if field.name in model}
        positions = model.get("max_positions", 0)
        learned = "max_positions" in model
        shape = ModelShape(**sizes, sequence_length=positions, learned_positions=learned)
        shapes = weight_shapes(tensors(shape, VARIANTS[ORDINARY]))
        for weight in self.weights():
            if weight.shape != shapes[weight.name]:
                raise UserError(
                    f"{self.directory}: {weight.name} has the shape {weight.shape}, and its config.json "
                    f"makes it {shapes[weight.name]}"
                )

    def _norm(self, ours: str, theirs: str) -> Iterator[Weight]:
        for part in ("weight", "bias"):
            yield self._whole(f"{ours}.{part}", f"{theirs}.{part}")

    def _whole(self, ours: str, theirs: str) -> Weight:
        return self._made(ours, theirs, lambda tensor: tensor)

    def _made(self, ours: str, theirs: str, turn: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
        """Return the weight that `turn` makes of a tensor; the shape is computed without reading the file."""
        stored = self.tensors.shape(theirs)
        try:
            shape = tuple(turn(torch.empty(stored, device="meta")).shape)
        except (RuntimeError, IndexError) as error:
            raise UserError(
                f"{self.directory}: {theirs} has the shape {stored}, and is not the matrix that it should be"
            ) from error
        return Weight(ours, shape, lambda: turn(self.tensors.read(theirs)))

    def _setting(self, key: str, kind: str, settings: dict[str, Any] | None = None) -> Any:
        """Return a setting of config.json. Raises UserError: it is no value of this kind (see `_KINDS`)."""
        value = (settings or self.settings)[key]
        if not _KINDS[kind](value):
            raise UserError(f"{self.directory}: its {key} is {value!r}, and not {kind}")
        return value

    def _size(self, key: str) -> int:
        return int(self._setting(key, "a whole number above 0"))

    def _tied(self) -> bool:
        return bool(self._setting("tie_word_embeddings", "true or false"))

    def _output(self) -> Iterator[Weight]:
        if not self._tied():
            yield self._whole("output", "lm_head.weight")


class Starcoder2Model(SourceModel):
    """Rotary positions."""

    bias_endings = ("_proj.bias", ".c_fc.bias")

    @cached_property
    def model(self) -> dict[str, Any]:
        given = self.settings
        heads = self._size("num_attention_heads")
        rotation = given.get("rope_parameters") or {}
        if rotation:
            self._setting("rope_parameters", "an object")
        if rotation.get("rope_type", "default") != "default" or given.get("rope_scaling"):
            raise UserError(
                f"{self.directory}: its rotation is scaled, which it is not here: it cannot be imported"
            )
        stated = rotation if "rope_theta" in rotation else given
        base = float(self._setting("rope_theta", "a number above 0", stated))
        if not base.is_integer():
            raise UserError(
                f"{self.directory}: its rope_theta is {base!r}, and model.rotary_base is a whole number: it "
                "cannot be imported"
            )
        return {
            "num_layers": self._size("num_hidden_layers"),
            "hidden_size": self._size("hidden_size"),
            "num_attention_heads": heads,
            "num_query_groups": self._size("num_key_value_heads")
            if given.get("num_key_value_heads")
            else heads,
            "head_dim": self._size("head_dim")
            if given.get("head_dim")
            else self._size("hidden_size") // heads,
            "ffn_hidden_size": self._size("intermediate_size"),
            "vocab_size": self._size("vocab_size"),
            "position_embedding": "rope",
            "rotary_base": int(base),
            "layernorm_epsilon": self._setting("norm_epsilon", "a number above 0"),
            "tied_embeddings": self._tied(),
        }

    def weights(self) -> Iterator[Weight]:
        yield self._whole("embedding.word", "model.embed_tokens.weight")
        for number in range(self.model["num_layers"]):
            ours, theirs = f"layer.{number}", f"model.layers.{number}"
            yield from self._norm(f"{ours}.norm1", f"{theirs}.input_layernorm")
            for part in ("query", "key", "value"):
                yield self._whole(f"{ours}.attention.{part}", f"{theirs}.self_attn.{part[0]}_proj.weight")
            yield self._whole(f"{ours}.attention.proj", f"{theirs}.self_attn.o_proj.weight")
            yield from self._norm(f"{ours}.norm2", f"{theirs}.post_attention_layernorm")
            yield self._whole(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc.weight")
            yield self._whole(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj.weight")
        yield from self._norm("norm", "model.norm")
        yield from self._output()


class GPT2Model(SourceModel):
    """Learned positions; matrices are stored transposed."""

    bias_endings = (".c_attn.bias", ".c_proj.bias", ".c_fc.bias")

    @cached_property
    def model(self) -> dict[str, Any]:
        hidden, heads = self._size("n_embd"), self._size("n_head")
        return {
            "num_layers": self._size("n_layer"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": heads,
            "head_dim": hidden // heads,
            "ffn_hidden_size": self._size("n_inner") if self.settings["n_inner"] else 4 * hidden,
            "vocab_size": self._size("vocab_size"),
            "position_embedding": "learned",
            "max_positions": self._size("n_positions"),
            "layernorm_epsilon": self._setting("layer_norm_epsilon", "a number above 0"),
            "tied_embeddings": self._tied(),
        }

    def weights(self) -> Iterator[Weight]:
        base = "transformer." if "transformer.wte.weight" in self.tensors else ""
        yield self._whole("embedding.word", f"{base}wte.weight")
        yield self._whole("embedding.position", f"{base}wpe.weight")
        for number in range(self.model["num_layers"]):
            ours, theirs = f"layer.{number}", f"{base}h.{number}"
            yield from self._norm(f"{ours}.norm1", f"{theirs}.ln_1")
            for place, part in enumerate(("query", "key", "value")):
                turn = partial(_third, place=place)
                yield self._made(f"{ours}.attention.{part}", f"{theirs}.attn.c_attn.weight", turn)
            for name, matrix in (("attention.proj", "attn.c_proj"), ("mlp.fc1", "mlp.c_fc")):
                yield self._made(f"{ours}.{name}", f"{theirs}.{matrix}.weight", torch.t)
            yield from self._norm(f"{ours}.norm2", f"{theirs}.ln_2")
            yield self._made(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj.weight", torch.t)
        yield from self._norm("norm", f"{base}ln_f")
        yield from self._output()


KINDS: dict[str, type[SourceModel]] = {"starcoder2": Starcoder2Model, "gpt2": GPT2Model}


def open_source(directory: Path) -> SourceModel:
    """Open the model in a directory of Hugging Face.

    Raises:
        UserError: there is no model, or of another class, or with settings that this program has not.
    """
    file = directory / "config.json"
    try:
        stated = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); give a directory of Hugging Face") from error
    kind = stated.get("model_type") if isinstance(stated, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(
            f"{directory} is a model of type {kind!r}; only {' and '.join(KINDS)} can be imported"
        )
    settings = {**MUST_BE[kind], **DEFAULTS[kind], **stated}
    for key, value in MUST_BE[kind].items():
        if settings[key] != value:
            raise UserError(
                f"{directory}: its {key} is {settings[key]!r} and here it is {value!r}: it cannot be imported"
            )
    source = KINDS[kind](directory, settings, StoredTensors(directory))
    try:
        source.check_shapes()
    except KeyError as error:
        raise UserError(f"{file} does not say its {error.args[0]}") from error
    source.check_the_rest()
    return source


def _third(fused: torch.Tensor, place: int) -> torch.Tensor:
    """Return the queries, keys or values of GPT2's `[hidden, 3 * hidden]`, as rows."""
    return fused.t().chunk(3)[place]


def import_model(directory: Path, out: Path, config_name: str, overrides: list[str]) -> Config:
    """Write `out` from the model in `directory`; the configuration is `config_name`'s except for the model.

    Args:
        overrides: section.key=value; the variant is `pretrained` unless they set another.

    Raises:
        UserError: `out` exists; this program does not train the directory's model; the configuration is
            refused.
    """
    refuse_existing(out)
    source = open_source(directory)
    with made_beside(out) as made:
        model, heads = json.dumps(source.model), json.dumps(_head_digests(source))
        stated = {"format": FORMAT, "model": model, "heads": heads}
        write_weights(made / WEIGHTS, list(source.weights()), source.tensors.dtype(), stated)
        # The configuration is checked with the file's present path, and written with its final one.
        values = load_config(config_name, _overrides(source, made / WEIGHTS, overrides)).resolved()
        values["model"]["initial_weights"] = str(out / WEIGHTS)
        write_text_atomically(made / CONFIG, dump_yaml(values))
    return load_config(str(out / CONFIG))


def _overrides(source: SourceModel, weights: Path, overrides: list[str]) -> list[str]:
    sizes = {key: value for key, value in source.model.items() if key != "max_positions"}
    own = [override_text(f"model.{key}", value) for key, value in sizes.items()]
    own += [override_text("model.initial_weights", str(weights)), "attention.variant=pretrained"]
    if "max_positions" in source.model:
        own.append(f"data.sequence_length={source.model['max_positions']}")
    return [*own, *overrides]


def _head_digests(source: SourceModel) -> dict[str, list[str]]:
    """Return {tensor of W_Q or W_K: the SHA-256 of every head's rows in float32}."""
    weights = {weight.name: weight for weight in source.weights()}
    layers, head_dim = range(source.model["num_layers"]), source.model["head_dim"]
    names = [bank_name(layer, role) for layer in layers for role in ROLES]
    return {name: [head_digest(head) for head in weights[name].make().split(head_dim)] for name in names}
