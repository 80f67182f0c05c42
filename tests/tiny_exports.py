"""Exports without a training: tiny models of transformers, the real tokenizer, an export.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from data_pipeline.shards.manifest import read_manifest
from pretrain.export.tokenizer import write_tokenizer
from tests.tiny import VOCAB_SIZE

LENGTH = 64


def rotary_rows(layers: int = 2) -> dict[str, list[list[int]]]:
    """All rows of Q and K of Starcoder2 of width 32, but of one head of layer 0, which trained."""
    names = [
        f"model.layers.{layer}.self_attn.{role}_proj.weight"
        for layer in range(layers)
        for role in "qk"
    ]
    return {name: [[0, 8], [16, 32]] if ".0." in name else [[0, 32]] for name in names}


def learned_rows(layers: int = 2) -> dict[str, list[list[int]]]:
    """All rows of Q and K of GPT2 of width 32."""
    return {f"transformer.h.{layer}.attn.c_attn.weight": [[0, 64]] for layer in range(layers)}


ROTARY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LEARNED: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4}


def model_of(model_type: str, **settings: Any) -> Any:
    """A model of transformers, its weights drawn from torch's generator."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))


def tiny_language_model(rotary: bool) -> Any:
    """Two layers of width 32 with four heads."""
    ids = {"bos_token_id": 2, "eos_token_id": 2, "vocab_size": VOCAB_SIZE}
    if not rotary:
        return model_of("gpt2", **LEARNED, **ids, n_positions=LENGTH)
    more = {"num_key_value_heads": 4, "max_position_embeddings": LENGTH, "use_bias": False}
    return model_of("starcoder2", **ROTARY, **ids, **more, tie_word_embeddings=True)


def tiny_export(
    out: Path,
    shards: Path,
    variant: str,
    *,
    rotary: bool = True,
    seed: int = 1,
    frozen: bool = True,
) -> Path:
    """Make the directory `out`.

    Args:
        seed: of the weights; also what export.json says that the run's was.
        frozen: Q and K were, as `rotary_rows` or `learned_rows` says.
    """
    torch.manual_seed(seed)
    tiny_language_model(rotary).save_pretrained(out)
    write_tokenizer(read_manifest(shards), out, LENGTH)
    rows = rotary_rows() if rotary else learned_rows()
    facts = export_facts(
        out.name,
        variant,
        seed,
        sequence_length=LENGTH,
        model="Starcoder2ForCausalLM" if rotary else "GPT2LMHeadModel",
        frozen_rows=rows if frozen else {},
    )
    (out / "export.json").write_text(json.dumps(facts))
    return out


def export_facts(name: str, variant: str, seed: int, **changes: Any) -> dict[str, Any]:
    """Return what export.json has, as far as verbs read it."""
    return {
        "run": name,
        "variant": variant,
        "attention": {"variant": variant, "seed": seed, "adapters": []},
        "seed": seed,
        "step": 4,
        "parameters": {"trainable": 96, "frozen": 32},
        "sequence_length": 16,
        "data": {"fingerprint": "a" * 64},
        "model": "GPT2LMHeadModel",
        "frozen_rows": {},
        "folded": [],
        **changes,
    }
