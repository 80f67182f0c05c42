"""The bound on scores: never exceeded by a real layer, reached where it can be, and held."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_patches.attention.module import FrozenAttention
from megatron_patches.recipe.block import NORMS, LayerNorm
from megatron_patches.recipe.parts import ModelShape, Place, Tensor
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.score_bound import (
    QUERY_KEY_NORM,
    SLACK,
    Weights,
    adapter_weights,
    bound_at_start,
    by_heads,
    held_within,
    is_bounded,
    largest_bound,
    score_bounds,
    weights_of_layers,
)
from megatron_patches.recipe.tensors import tensors
from megatron_patches.recipe.variants import policy_for

HIDDEN, HEADS, GROUPS, HEAD_DIM = 64, 4, 2, 16
ALL = ("low_rank", "query_key_bias", "short_convolution", "channel_scale", "logit_scale")
BOUNDED: list[tuple[str, dict[str, Any], bool]] = [
    ("orthogonal", {}, False),
    ("hadamard", {"adapters": ("query_key_bias",)}, False),
    ("monarch_shared_conv", {}, False),
    ("orthogonal", {"adapters": ALL, "low_rank": 3}, False),
    ("gaussian", {"adapters": (*ALL, "qk_norm")}, False),
    ("vanilla", {"adapters": ("qk_norm", "short_convolution"), "convolved": "value"}, False),
    ("gaussian", {"adapters": ("channel_scale",)}, True),
]


def shape(qk_norm: bool = False) -> ModelShape:
    return ModelShape(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        head_dim=HEAD_DIM,
        ffn_hidden_size=4 * HIDDEN,
        vocab_size=96,
        sequence_length=32,
        learned_positions=True,
        tied_embeddings=True,
        qk_norm=qk_norm,
    )


def drawn(policy: QKPolicy, qk_norm: bool, scale: float) -> dict[str, np.ndarray[Any, Any]]:
    """Return a layer's weights at random, in the shapes of live ones."""
    draw = np.random.default_rng(3)
    heads = {"query": HEADS, "key": GROUPS, None: 1}
    sizes = {
        one.name: (heads[one.role] * one.shape[0], *one.shape[1:])  # type: ignore[index]
        for one in adapter_weights(shape(), policy).values()
    }
    sizes |= {"input_layernorm.weight": (HIDDEN,), "input_layernorm.bias": (HIDDEN,)}
    sizes |= dict.fromkeys(QUERY_KEY_NORM, (HEAD_DIM,)) if qk_norm else {}
    return {name: scale * draw.standard_normal(size) for name, size in sizes.items()}


def bounds(policy: QKPolicy, values: Weights, qk_norm: bool) -> np.ndarray[Any, Any]:
    weights = by_heads(shape(qk_norm), policy, values=values, heads=HEADS)
    return score_bounds(shape(qk_norm), policy, weights, HEADS)


@pytest.mark.parametrize(("variant", "axes", "qk_norm"), BOUNDED)
def test_no_score_of_a_layer_exceeds_it(variant: str, axes: dict[str, Any], qk_norm: bool) -> None:
    policy = policy_for(variant, axes)
    assert is_bounded(shape(qk_norm), policy)
    values = drawn(policy, qk_norm, scale=0.7)
    layer = FrozenAttention(
        HIDDEN,
        HEADS,
        seed=5,
        layer=0,
        num_query_groups=GROUPS,
        variant=variant,
        qk_norm=qk_norm,
        rotary_base=100.0,
        dtype=torch.float64,
        **axes,
    )
    for name, parameter in layer.named_parameters():
        own = name if name in values else name.rpartition(".")[2]
        if own in values:
            parameter.data.copy_(torch.from_numpy(values[own]))
    normed = torch.nn.functional.layer_norm(
        torch.randn(8, 32, HIDDEN, dtype=torch.float64) ** 5,
        (HIDDEN,),
        torch.from_numpy(values["input_layernorm.weight"]),
        torch.from_numpy(values["input_layernorm.bias"]),
    )
    with torch.no_grad():
        query, key, _ = layer.queries_keys_values(normed)
    key = key.repeat_interleave(HEADS // GROUPS, dim=2)
    scores = torch.einsum("bqhd,bkhd->hqk", query[:1], key[:1]) / math.sqrt(HEAD_DIM)
    limit = bounds(policy, values, qk_norm)
    largest = scores.abs().amax(dim=(1, 2)).numpy()
    assert (largest <= limit).all() and (largest > 1e-5 * limit).all()


def test_it_is_reached_at_the_start() -> None:
    """Of shared rows, by an input along a row; with taps, by two such tokens after each other."""
    assert bound_at_start(shape(), policy_for("orthogonal_shared")) == HIDDEN / 4
    convolved = policy_for("monarch_shared_conv")
    assert bound_at_start(shape(), convolved) == pytest.approx(HIDDEN / 4 * math.sqrt(2))
    assert bound_at_start(shape(qk_norm=True), policy_for("vanilla")) == pytest.approx(4)
    layer = FrozenAttention(
        HIDDEN, HEADS, seed=5, layer=0, variant="orthogonal_shared", dtype=torch.float64
    )
    rows = layer.query_key_weight
    assert rows is not None
    inputs = rows[:1][None] * math.sqrt(HIDDEN)
    query, key, _ = layer.queries_keys_values(inputs)
    score = (query * key).sum(-1)[0, 0, 0] / math.sqrt(HEAD_DIM)
    assert float(score) == pytest.approx(HIDDEN / 4)


@pytest.mark.parametrize("heads", [(("0", 0.5),), (("1", 1.0),)])
def test_model_qk_norm_bounds_heads_with_and_without_adapters(
    heads: tuple[tuple[str, float], ...],
) -> None:
    """Adapters belong to frozen heads: a layer has them for all heads, for some or for none."""
    policy = policy_for("orthogonal", {"frozen_heads": heads, "adapters": ALL, "low_rank": 3})
    normalised = shape(qk_norm=True)
    assert bound_at_start(normalised, policy) == pytest.approx(4)
    layers = weights_of_layers(tensors(normalised, policy), normalised, policy)
    values = [{name: np.full(one.shape, 2.0) for name, one in layer.items()} for layer in layers]
    assert largest_bound(normalised, policy, values, heads=HEADS) == pytest.approx(16)


@pytest.mark.parametrize(
    ("variant", "axes"),
    [
        ("vanilla", {}),
        ("gaussian", {}),
        ("hybrid", {"adapters": ("qk_norm",)}),
        ("orthogonal", {"frozen_roles": "key"}),
        ("unfreeze", {}),
        ("low_rank", {}),
        ("synthesizer_random", {}),
    ],
)
def test_there_is_none_where_rows_are_free(variant: str, axes: dict[str, Any]) -> None:
    assert bound_at_start(shape(), policy_for(variant, axes)) is None


class Bare(LayerNorm):
    """A LayerNorm without weights."""

    name = "bare"

    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        yield from ()


class Halved(LayerNorm):
    """Half of a LayerNorm."""

    name = "halved"

    def bound(self, hidden_size: int, weights: Weights) -> float:
        return super().bound(hidden_size, weights) / 2


def test_a_norm_says_what_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_for("orthogonal_shared")
    for norm, part in {Bare(): 1, Halved(): 1 / 4}.items():
        monkeypatch.setitem(NORMS, norm.name, norm)  # type: ignore[arg-type]
        found = bound_at_start(replace(shape(), norm=norm.name), policy)
        assert found == part * HIDDEN / 4


@pytest.mark.parametrize(("variant", "axes", "qk_norm"), BOUNDED)
@pytest.mark.parametrize("part", [0.9, 0.02])
def test_weights_are_held_within_a_limit(
    variant: str, axes: dict[str, Any], qk_norm: bool, part: float
) -> None:
    policy = policy_for(variant, axes)
    values = drawn(policy, qk_norm, scale=2.0)
    before = bounds(policy, values, qk_norm)
    limit = part * before.max()
    assert not held_within(before.max(), shape(qk_norm), policy, values=values, heads=HEADS)
    made = held_within(limit, shape(qk_norm), policy, values=values, heads=HEADS)
    assert made and all(one.shape == values[name].shape for name, one in made.items())
    rounded = {name: one.astype(np.float32).astype(float) for name, one in made.items()}
    after = bounds(policy, {**values, **rounded}, qk_norm)
    assert (after <= limit * (1 + SLACK)).all() and after.max() > 0.98 * limit
    assert not held_within(limit, shape(qk_norm), policy, values={**values, **rounded}, heads=HEADS)
    multiplied = bool({"channel_scale", "logit_scale", "qk_norm"} & set(policy.adapters))
    if multiplied and not qk_norm:  # the norm is left alone
        assert not any("layernorm" in name for name in made)


def test_heads_within_it_stay_as_they_are() -> None:
    policy = policy_for("orthogonal", {"adapters": ("logit_scale",)})
    values = drawn(policy, False, scale=1.0)
    values["logit_scale"] = np.array([1.0, -8.0, 1.0, 2.0])
    limit = bounds(policy, values, False)[3]
    made = held_within(limit, shape(), policy, values=values, heads=HEADS)
    assert made.keys() == {"logit_scale"}
    assert made["logit_scale"] == pytest.approx([1.0, -2.0, 1.0, 2.0], rel=1e-9)
