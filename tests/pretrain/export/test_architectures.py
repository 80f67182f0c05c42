"""The class of transformers that a run's model becomes: its weights by name, and refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_patches.model import parts
from megatron_patches.recipe import block
from megatron_patches.recipe.parts import ModelShape, Place, Tensor
from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.export import names
from pretrain.export.architectures import architecture_of
from pretrain.model.build import build_model
from pretrain.ranks.groups import ParallelContext

MODERN = ["model.norm=rmsnorm", "model.mlp=swiglu"]


class ShiftedNorm(block.RMSNorm):
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        yield from super().tensors(at, shape)
        yield block.norm_vector(at, "shift", shape.hidden_size, "zeros")


class ShiftedModule(parts.RMSNorm):
    def __init__(self, config: parts.TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.shift = torch.nn.Parameter(torch.zeros_like(self.weight))


def test_every_parameter_of_a_norm_is_exported(
    context: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(block.NORMS, "rmsnorm", ShiftedNorm())  # type: ignore[arg-type]
    monkeypatch.setitem(parts.NORMS, "rmsnorm", ShiftedModule)  # type: ignore[arg-type]
    config = load_config("demo", [*MODERN, "model.num_layers=1"])
    model = build_model(config, context)
    weights = [weight.name for weight in architecture_of(config).weights(model)]
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    expected = {f"{norm}.{name}" for norm in (*norms, "model.norm") for name in ("weight", "shift")}
    assert {name for name in weights if "norm" in name} == expected


def test_a_part_without_code_in_exports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("demo", ["model.mlp=swiglu"])
    monkeypatch.delitem(names._MLPS, "swiglu")
    with pytest.raises(UserError, match=r"nor modeling_ora\.py has the part 'swiglu'"):
        architecture_of(config)


def test_a_width_that_llama_s_configuration_cannot_have_is_refused() -> None:
    sizes = ["model.hidden_size=130", "model.num_attention_heads=4", "model.head_dim=32"]
    with pytest.raises(UserError, match=r"Llama's config\.json cannot have model\.hidden_size=130"):
        architecture_of(load_config("demo", [*sizes, *MODERN]))
    normed = architecture_of(load_config("demo", [*sizes, *MODERN, "model.qk_norm=true"]))
    assert normed.class_name == "Qwen3ForCausalLM"
