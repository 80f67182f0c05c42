"""Import of a Hugging Face directory as the initial weights of a run: `python -m pretrain import`.

OUT/weights.safetensors   every weight, under the name of its random stream at initialisation
OUT/config.yaml           a configuration of the same model, with these initial weights

transformers loads the classes of `names`, those without biases; this is the inverse of
`architectures`. A directory whose model computes anything else (biases that are not zero, another
activation, scaled rotation, a sliding window) is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_pipeline.io.files import write_text_atomically
from data_pipeline.io.forms import parse_json
from data_pipeline.tokenizer.identity import STORED_NAMES
from data_pipeline.tokenizer.tokenizer import number_of_ids
from megatron_patches.bank.initial_weights_file import FORMAT, bank_name, head_digest
from megatron_patches.bank.orthonormal import ROLES
from pretrain.config.load import load_config
from pretrain.config.sources import dump_yaml, override_text
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.export.directories import made_beside, refuse_existing
from pretrain.export.models import loading, named_code, require_transformers
from pretrain.export.names import CLASSES, ModelClass
from pretrain.export.weight_files import whole, write_weights

_HEAD = "lm_head.weight"
WEIGHTS, CONFIG = "weights.safetensors", "config.yaml"


@dataclass(frozen=True)
class SourceModel:
    """A model of transformers that the layers of this program can compute.

    Attributes:
        section: Section `model` of the configuration, and `max_positions` where positions are
            learned.
        weights: {stream: weight}, matrices as rows `[out, in]` (see
            `megatron_patches.model.initialize`).
        dtype: Type that holds all weights exactly.
    """

    section: dict[str, Any]
    weights: dict[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def bank_names(self) -> list[str]:
        """Return the names of W_Q and W_K of all layers."""
        layers = range(self.section["num_layers"])
        return [bank_name(layer, role) for layer in layers for role in ROLES]


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file: the format's name of its type, and its number of elements."""

    path: Path
    kind: str
    elements: int


def open_source(directory: Path) -> SourceModel:
    """Load the model in a directory of Hugging Face.

    Raises:
        UserError: transformers cannot load the directory, it holds another class, settings that
            this program lacks, or tensors that are not finite, are missing or have no place.
    """
    for file, key, value in named_code(directory):
        raise UserError(f"{file} has {key}={value}, code to run: it cannot be imported")
    require_transformers("import")
    _refuse_files_of_another_model(directory)
    from transformers import AutoConfig

    with loading(directory):
        config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    # Settings are judged before transformers builds the model, which says less of an odd one.
    model_class = CLASSES.get(config.model_type)
    if model_class is None:
        *first_types, last_type = CLASSES
        types = f"{', '.join(first_types)} and {last_type}"
        raise UserError(
            f"{directory} is a model of type '{config.model_type}'; only {types} can be imported"
        )
    _refuse_other_settings(directory, config, model_class)
    section = _section(directory, config, model_class)
    with loading(directory):
        stored = _stored_tensors(directory)
        model, info = _load(directory, config, stored)
    _refuse_other_tensors(directory, info)
    if section["tied_embeddings"] is True and _HEAD in stored:
        with loading(directory), safe_open(stored[_HEAD].path, framework="pt") as file:
            if not torch.equal(file.get_tensor(_HEAD).float(), model.get_input_embeddings().weight):
                raise ValueError(f"tie_word_embeddings is true, and {_HEAD} is not the embedding")
    weights = {}
    for stream, name, weight in _streams(directory, section, model_class, model):
        if name in info["missing_keys"]:
            raise UserError(f"{directory} has no weight {name}")
        if not torch.isfinite(weight).all():
            raise UserError(f"{directory}: {name} holds NaN or infinity: it cannot be imported")
        weights[stream] = weight
    # What is left are biases, which transformers would make zero.
    for name in sorted(info["missing_keys"]):
        raise UserError(
            f"{directory} has no {name}, which its config.json tells of; restore its files"
        )
    return SourceModel(section, weights, _stored_type(directory, stored))


def _refuse_other_settings(directory: Path, config: Any, model_class: ModelClass) -> None:
    """Refuse settings that change the computation, but no tensor, and sizes that no model has."""
    for key, must in model_class.required.items():
        if getattr(config, key) != must:
            raise UserError(
                f"{directory}: its {key} is {getattr(config, key)!r} and here it is {must!r}: it "
                "cannot be imported"
            )
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise UserError(
                f"{directory}: its layer_types has {kind!r}, and layers here attend to everything "
                "before: it cannot be imported"
            )
    for key in model_class.settings.values():
        value = getattr(config, key, None)
        if type(value) is int and value < 1:
            raise UserError(f"{directory}: its {key} is {value}, which no model has")


def _refuse_files_of_another_model(directory: Path) -> None:
    """Refuse an adapter, which would be left out, and files from outside the directory."""
    if (directory / "adapter_config.json").exists():
        raise UserError(
            f"{directory} has adapter_config.json, an adapter of another model: merge it into that "
            "model first"
        )
    with loading(directory):
        index = directory / "model.safetensors.index.json"
        files = parse_json(index.read_text())["weight_map"].values() if index.exists() else ()
        strange = [file for file in files if Path(file).name != file]
        parse_json((directory / "config.json").read_text())
    if strange:
        raise UserError(
            f"{index} names {strange[0]!r}, which is not in the directory: it cannot be imported"
        )
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")]):
        if path.resolve().parent not in _homes(directory):
            raise UserError(
                f"{path} is a link to {path.resolve()}, outside of the directory: put the file "
                "itself there"
            )


def _homes(directory: Path) -> tuple[Path, ...]:
    """Return where the files of a model may lie: its directory, and the blobs of the hub's cache.

    The cache holds models--NAME/snapshots/COMMIT/FILE, links into models--NAME/blobs.
    """
    real = directory.resolve()
    return (real, real.parents[1] / "blobs") if real.parent.name == "snapshots" else (real,)


def _load(directory: Path, config: Any, stored: dict[str, _Stored]) -> tuple[Any, Any]:
    """Return the model in float32, and transformers' report on the tensors in its files."""
    from transformers import AutoModelForCausalLM

    # Before any memory is taken: config.json may ask for terabytes.
    _refuse_oversized(config, stored)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(directory),
        config=config,
        local_files_only=True,
        dtype=torch.float32,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are refused by `_refuse_other_tensors`
        output_loading_info=True,
    )
    return loaded


def _refuse_other_tensors(directory: Path, info: Any) -> None:
    """Refuse tensors of another shape, and tensors without a place in the model."""
    for name, stored_shape, expected in sorted(info["mismatched_keys"]):
        shapes = f"the shape {tuple(stored_shape)}, and its config.json makes it {tuple(expected)}"
        raise UserError(f"{directory}: {name} has {shapes}")
    if strange := sorted(info["unexpected_keys"]):
        raise UserError(
            f"{directory}: {strange[0]} has no place in the model here, and without it the model "
            "is another one: it cannot be imported"
        )


def _section(directory: Path, config: Any, model_class: ModelClass) -> dict[str, Any]:
    """Return the section `model` of the configuration, and `max_positions` of learned positions."""
    class_settings = {
        ours: getattr(config, theirs, None) for ours, theirs in model_class.settings.items()
    }
    section: dict[str, Any] = {"position_embedding": model_class.positions, **class_settings}
    section |= {**model_class.parts, "logit_softcap": None}
    section.setdefault("num_query_groups", section["num_attention_heads"])
    hidden = section["hidden_size"]
    section["head_dim"] = section.get("head_dim") or hidden // section["num_attention_heads"]
    section["ffn_hidden_size"] = section["ffn_hidden_size"] or 4 * hidden  # GPT2 may leave it out
    if model_class.positions == "rope":
        section["rotary_base"] = _rotary_base(directory, config.rope_parameters)
    return section


def _rotary_base(directory: Path, rotation: dict[str, Any]) -> int:
    if rotation["rope_type"] != "default":
        raise UserError(
            f"{directory}: its rope_type is {rotation['rope_type']!r}, a scaled rotation, which "
            "there is not here: it cannot be imported"
        )
    theta = rotation["rope_theta"]
    try:
        base = float(theta)
    except (OverflowError, TypeError, ValueError):  # config.json may hold any number or word
        base = math.nan
    if not base.is_integer():
        raise UserError(
            f"{directory}: its rope_theta is {str(theta)[:40]}, and model.rotary_base is a whole "
            "number: it cannot be imported"
        )
    return int(base)


def _streams(
    directory: Path, section: dict[str, Any], model_class: ModelClass, model: Any
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield every weight with its key and its name in transformers; biases must be zero."""
    from transformers.pytorch_utils import Conv1D

    modules = model_class.modules(section["num_layers"], section["tied_embeddings"])
    for name, keys in modules.items():
        module = model.get_submodule(name)
        bias = getattr(module, "bias", None)
        weight = module.weight.detach()
        if weight.dim() == 1:  # of a norm
            yield f"{keys[0]}.weight", f"{name}.weight", weight
            if bias is not None:
                yield f"{keys[0]}.bias", f"{name}.bias", bias.detach()
            continue
        if bias is not None and bool((bias != 0).any()):
            raise UserError(
                f"{directory}: {name}.bias is not zero, and layers here have no such bias: it "
                "cannot be imported"
            )
        rows = weight.t() if isinstance(module, Conv1D) else weight
        for key, part in zip(keys, rows.chunk(len(keys)), strict=True):
            yield key, f"{name}.weight", part


def _stored_tensors(directory: Path) -> dict[str, _Stored]:
    """Return the tensors in the safetensors files that transformers will load, by name."""
    stored: dict[str, _Stored] = {}
    whole = directory / "model.safetensors"
    for path in [whole] if whole.exists() else sorted(directory.glob("model-*.safetensors")):
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:  # it names no file, and there may be thirty
            raise ValueError(f"{path.name}: {error}") from error
        with opened as file:
            for name, tensor in ((name, file.get_slice(name)) for name in sorted(file.keys())):
                if name in stored:
                    raise ValueError(f"{name} is in {stored[name].path.name} and in {path.name}")
                size = math.prod(tensor.get_shape())
                stored[name] = _Stored(path, tensor.get_dtype(), size)
    return stored


def _refuse_oversized(config: Any, stored: dict[str, _Stored]) -> None:
    """Refuse a model far larger than its files, before memory is taken for it."""
    from transformers import AutoModelForCausalLM

    if not stored:
        return  # transformers reports the missing file
    if (layers := config.num_hidden_layers) > 16 * len(stored):
        raise ValueError(
            f"config.json tells of {layers} layers, and the files have {len(stored)} tensors"
        )
    with torch.device("meta"):
        needed = sum(
            weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters()
        )
    if needed > 16 * (held := sum(tensor.elements for tensor in stored.values())):
        raise ValueError(f"config.json makes {needed:,} parameters, and the files have {held:,}")


def _stored_type(directory: Path, stored: dict[str, _Stored]) -> torch.dtype:
    """Return bf16 if every tensor is stored in bf16, else fp32; refuse other types of weights."""
    for name, tensor in stored.items():
        kind = tensor.kind
        if name.endswith(".weight") and kind not in ("F32", "BF16", "F16"):
            raise UserError(
                f"{directory}: {name} is of type {kind}; only fp32, bf16 and fp16 can be imported"
            )
    kinds = {tensor.kind for tensor in stored.values()}
    return torch.bfloat16 if kinds == {"BF16"} else torch.float32


def orthonormalised(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the nearest rows that are orthogonal and of one length within each head.

    They are mean(S) U Vᵀ for a head with W = U S Vᵀ.

    Args:
        rows: Rows of queries or keys, `[heads * head_dim, hidden]`.
        head_dim: Width of a head, at most `hidden`.

    Returns:
        Rows of the same shape, float32; computed in float64.
    """
    left, sizes, right = torch.linalg.svd(
        rows.double().unflatten(0, (-1, head_dim)), full_matrices=False
    )
    return (sizes.mean(-1)[:, None, None] * (left @ right)).flatten(0, 1).float()


def import_model(
    directory: Path,
    out: Path,
    config_name: str,
    overrides: list[str],
    *,
    orthonormal: bool = False,
) -> Config:
    """Write initial weights and a configuration from a model of transformers.

    Args:
        config_name: Configuration of everything but the model.
        overrides: section.key=value; the variant is `pretrained` unless they set another.
        orthonormal: Whether W_Q and W_K of each head are `orthonormalised`.

    Raises:
        UserError: `out` exists, this program does not train the directory's model, or the
            configuration is refused.
    """
    refuse_existing(out)
    source = open_source(directory)
    if orthonormal:
        source = _with_orthonormal_rows(source)
    weights = [whole(name, weight) for name, weight in source.weights.items()]
    with made_beside(out) as new_directory:
        rows = {
            name: source.weights[name].split(source.section["head_dim"])
            for name in source.bank_names
        }
        model = json.dumps(source.section)
        heads = json.dumps(
            {name: [head_digest(head) for head in head_rows] for name, head_rows in rows.items()}
        )
        stated = {"format": FORMAT, "model": model, "heads": heads}
        write_weights(new_directory / WEIGHTS, weights, source.dtype, stated)
        # The configuration is checked with the file's present path, and written with its final one.
        values = load_config(
            config_name,
            [*_settings(source, directory, new_directory / WEIGHTS), *overrides],
        ).as_dict()
        values["model"]["initial_weights"] = str(out / WEIGHTS)
        write_text_atomically(new_directory / CONFIG, dump_yaml(values))
    return load_config(str(out / CONFIG))


def _with_orthonormal_rows(source: SourceModel) -> SourceModel:
    """Return the model with other W_Q and W_K, which bf16 would not keep orthogonal.

    Raises:
        UserError: heads are wider than hidden states, so that their rows cannot be orthogonal.
    """
    head_dim, hidden = source.section["head_dim"], source.section["hidden_size"]
    if head_dim > hidden:
        raise UserError(
            f"--orthonormal needs heads that are no wider than hidden_size={hidden}, and these "
            f"have head_dim={head_dim}"
        )
    rows = {name: orthonormalised(source.weights[name], head_dim) for name in source.bank_names}
    return replace(source, weights=source.weights | rows, dtype=torch.float32)


def _settings(source: SourceModel, directory: Path, weights: Path) -> list[str]:
    """Return the model's settings as overrides, with as many tokens as its tokenizer has ids."""
    sizes = {key: value for key, value in source.section.items() if key != "max_positions"}
    if (tokenizer := directory / STORED_NAMES[1]).exists():
        sizes["vocab_size"] = min(sizes["vocab_size"], number_of_ids(tokenizer))
    settings = [override_text(f"model.{key}", value) for key, value in sizes.items()]
    settings += [
        override_text("model.initial_weights", str(weights)),
        "attention.variant=pretrained",
    ]
    if "max_positions" in source.section:
        settings.append(f"data.sequence_length={source.section['max_positions']}")
    return settings
