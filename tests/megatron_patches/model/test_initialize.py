"""Initial values: their scale, the same for every variant, marked for DeepSpeed's norm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_patches.bank.initial_weights_file import FORMAT, GivenWeights
from megatron_patches.bank.orthonormal import ROLES
from megatron_patches.errors import MethodError
from tests.megatron_patches.bank.recipes import shard
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, LAYERS, STD, build


def test_scales(one_rank: dist.ProcessGroup) -> None:
    residual = STD / math.sqrt(2 * LAYERS)
    for name, weight in build("vanilla").named_parameters():
        if "layernorm" in name:
            assert torch.equal(weight, torch.full_like(weight, float(name.endswith("weight"))))
            continue
        into_the_stream = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        assert weight.std().item() == pytest.approx(
            residual if into_the_stream else STD, rel=0.1
        ), name
        assert abs(weight.mean().item()) < 0.1 * STD


def test_what_variants_share_starts_the_same(one_rank: dist.ProcessGroup) -> None:
    vanilla = dict(build("vanilla").named_parameters())
    frozen = dict(build("orthogonal").named_parameters())
    shared = vanilla.keys() & frozen.keys()
    assert len(shared) == len(vanilla) - LAYERS and all(
        torch.equal(vanilla[n], frozen[n]) for n in shared
    )
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}.self_attention.linear_qkv"
        fused = vanilla[f"{prefix}.weight"].view(HEADS, 3, HEAD_DIM, HIDDEN)
        assert torch.equal(fused[:, 2].reshape(-1, HIDDEN), frozen[f"{prefix}.value_weight"])


def test_orthogonal_trainable_starts_from_the_rows_that_orthogonal_freezes(
    one_rank: dist.ProcessGroup,
) -> None:
    trained = build("orthogonal_trainable")
    frozen = build("orthogonal")
    for ours, theirs in zip(trained.decoder.layers, frozen.decoder.layers, strict=True):
        fused = ours.self_attention.linear_qkv.weight.view(HEADS, 3, HEAD_DIM, HIDDEN)
        linear = theirs.self_attention.linear_qkv
        for position, role in enumerate(ROLES):
            rows = shard(linear.recipe, linear.layer, role, torch.float32)
            assert torch.equal(fused[:, position].reshape(-1, HIDDEN), rows)


@pytest.mark.parametrize("axes", [{}, {"construction": "monarch", "scope": "layer"}])
def test_rows_that_train_start_the_same_with_an_adapter(
    one_rank: dist.ProcessGroup, axes: dict[str, str]
) -> None:
    alone, corrected = (
        build("orthogonal_trainable", dtype=torch.bfloat16, **axes, **more)
        .decoder.layers[0]
        .self_attention.linear_qkv
        for more in ({}, {"adapters": ("channel_scale",)})
    )
    by_role = alone.weight.view(HEADS, 3, HEAD_DIM, HIDDEN)[:, :2].transpose(0, 1)
    assert torch.equal(corrected.trained_query_key, by_role.reshape(-1, HIDDEN))


@pytest.mark.parametrize("variant", ["vanilla", "orthogonal", "synthesizer_factorized"])
def test_all_but_the_norms_are_marked_as_sharded(one_rank: dist.ProcessGroup, variant: str) -> None:
    for name, parameter in build(variant).named_parameters():
        if "layernorm" in name or "position" in name:
            assert not getattr(parameter, "tensor_model_parallel", False), name
            continue
        by_columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        assert parameter.tensor_model_parallel and parameter.partition_dim == by_columns, name


@pytest.mark.parametrize("lost", ["layer.1.norm2.weight", "layer.0.norm1.bias", "norm.bias"])
def test_a_file_without_a_norm_is_refused(
    one_rank: dist.ProcessGroup, tmp_path: Path, lost: str
) -> None:
    places = [f"layer.{layer}.{norm}" for layer in range(LAYERS) for norm in ("norm1", "norm2")]
    names = [
        f"{norm_name}.{part}" for norm_name in (*places, "norm") for part in ("weight", "bias")
    ]
    vectors = {name: torch.full((HIDDEN,), 2.0 + n) for n, name in enumerate(names)}
    metadata = {"format": FORMAT, "model": "{}", "heads": "{}"}
    whole, damaged = tmp_path / "whole.safetensors", tmp_path / "damaged.safetensors"
    save_file(vectors, whole, metadata)
    weights = dict(build("vanilla", initial_weights=GivenWeights(whole)).named_parameters())
    assert torch.equal(weights["decoder.final_layernorm.bias"], vectors["norm.bias"])
    save_file({name: vectors[name] for name in names if name != lost}, damaged, metadata)
    with pytest.raises(MethodError, match=rf"damaged\.safetensors cannot be used: {lost}: .*"):
        build("vanilla", initial_weights=GivenWeights(damaged))
