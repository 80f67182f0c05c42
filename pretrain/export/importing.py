"""Import of a Hugging Face directory as the initial weights of a run: `python -m pretrain import`.

OUT/weights.safetensors   every weight, under the name of its random stream at initialisation
OUT/config.yaml           a configuration of the same model, with these initial weights
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_patches.bank.initial_weights_file import FORMAT, head_digest
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.export.directories import made_beside, refuse_existing
from pretrain.export.source_model import SourceModel, bank_names, open_source
from pretrain.export.weight_files import write_weights
from pretrain.runs.directory import write_text_atomically

WEIGHTS = "weights.safetensors"
CONFIG = "config.yaml"


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
        weights = list(source.weights())
        dtype = _dtype(source)
        sizes = source.model
        stated = {"format": FORMAT, "model": json.dumps(sizes), "heads": json.dumps(_head_digests(source))}
        write_weights(made / WEIGHTS, weights, dtype, stated)
        # The configuration is checked with the file's present path, and written with its final one.
        text = load_config(config_name, _overrides(source, made / WEIGHTS, overrides)).to_yaml()
        write_text_atomically(made / CONFIG, text.replace(str(made), str(out)))
    return load_config(str(out / CONFIG))


def _overrides(source: SourceModel, weights: Path, overrides: list[str]) -> list[str]:
    sizes = {key: value for key, value in source.model.items() if key != "max_positions"}
    own = [f"model.{key}={json.dumps(value)}" for key, value in sizes.items()]
    own += [f"model.initial_weights={weights}", "attention.variant=pretrained"]
    if "max_positions" in source.model:
        own.append(f"data.sequence_length={source.model['max_positions']}")
    return [*own, *overrides]


def _dtype(source: SourceModel) -> torch.dtype:
    """Return bf16 if the embedding is stored in bf16, else fp32."""
    stored = next(source.weights()).make().dtype
    if stored not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"{source.directory} has weights of {stored}; only fp32, bf16 and fp16 can be imported"
        )
    return torch.bfloat16 if stored == torch.bfloat16 else torch.float32


def _head_digests(source: SourceModel) -> dict[str, list[str]]:
    """Return {tensor of W_Q or W_K: the SHA-256 of every head's rows in float32}."""
    weights = {weight.name: weight for weight in source.weights()}
    return {
        name: [head_digest(head) for head in weights[name].make().split(source.model["head_dim"])]
        for name in bank_names(source)
    }
