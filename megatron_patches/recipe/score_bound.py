"""Bound on the scores of attention before the softmax, from what makes them. No torch.

    |q·k| / √head_dim ≤ |q| |k| / √head_dim
    |x| ≤ √hidden_size · max |weight| + |bias|     after the norm before attention
    |W x| ≤ |x|                                    orthonormal rows
    |g ∘ q / rms(q)| ≤ √head_dim · max |g|         normalised queries, keys alike

Adapters say what they make of |q| and |k| (`adapters.Adapter.bound`); rotary positions change
neither. Arrays are float64 `[query heads, ...]`: what belongs to a key head is repeated for its
query heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_patches.recipe.adapters import (
    Adapter,
    AdapterWeight,
    Array,
    HeadNorms,
    even_values,
)
from megatron_patches.recipe.block import NORMS
from megatron_patches.recipe.parts import ModelShape, Tensor
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.tensors import adapter_sizes, tensors

NORM = "input_layernorm."
"""Beginning of the names of the weights of the norm before attention."""
QUERY_KEY_NORM = ("q_layernorm.weight", "k_layernorm.weight")
HALVINGS = 60
NOTHING = 1e-30
"""Factor of what is as good as gone."""
SLACK = 1e-6
"""Part of a limit that rounding to fp32 may exceed, so that what is held once stays as it is."""

Weights = Mapping[str, Array]
"""The weights of a layer that its bound depends on, by the names that `weights_of_layers` has."""


def is_bounded(shape: ModelShape, policy: QKPolicy) -> bool:
    """Return whether scores have a bound: by norms, or by frozen orthonormal rows of all heads.

    Args:
        shape: sizes of the model, and its parts.
        policy: kind of attention.
    """
    if policy.synthesizer or shape.qk_norm:
        return not policy.synthesizer
    every = range(shape.num_query_groups)
    frozen = policy.frozen_groups(shape.num_layers, len(every))
    whole = all(len(groups) == len(every) for groups in frozen)
    normalised = "qk_norm" in policy.adapters and (policy.trainable or whole)
    drawn = policy.init == "orthogonal" and len(policy.frozen_row_roles) == 2 - policy.shared
    return normalised or (drawn and whole and not policy.trains_later)


def weights_of_layers(
    inventory: Iterable[Tensor], shape: ModelShape, policy: QKPolicy
) -> list[dict[str, Tensor]]:
    """Return for each layer {own name: tensor} of the weights that its bound depends on.

    Args:
        inventory: the tensors of the model.
        shape: sizes of the model.
        policy: kind of attention.
    """
    adapters = adapter_weights(shape, policy)
    layers: list[dict[str, Tensor]] = [{} for _ in range(shape.num_layers)]
    for tensor in inventory:
        own = tensor.name.rpartition(".")[2]
        if tensor.kind == "norm":
            own = ".".join(tensor.name.split(".")[-2:])
        known = own in adapters if tensor.kind == "adapter" else own in QUERY_KEY_NORM
        known |= own.startswith(NORM)
        if known and tensor.layer is not None:
            layers[tensor.layer][own] = tensor
    return layers


def adapter_weights(shape: ModelShape, policy: QKPolicy) -> dict[str, AdapterWeight]:
    """Return {name: declaration} of the weights of adapters that the bound depends on.

    They change queries or keys, which model.qk_norm normalises after them.

    Args:
        shape: sizes of the model, and its parts.
        policy: kind of attention.
    """
    if shape.qk_norm:
        return {}
    sizes = adapter_sizes(shape, policy)
    declared = (one for adapter in policy.corrections for one in adapter.weights(sizes))
    return {one.name: one for one in declared if one.role != "value"}


def by_heads(shape: ModelShape, policy: QKPolicy, values: Weights, heads: int) -> dict[str, Array]:
    """Return the weights of a layer by query heads.

    Args:
        shape: sizes of the model.
        policy: kind of attention.
        values: the weights in the shapes of the live ones.
        heads: query heads of the rank.
    """
    made = dict(values)
    for name, weight in adapter_weights(shape, policy).items():
        if weight.role is not None:
            of_heads = values[name].reshape(-1, *weight.shape)
            made[name] = np.repeat(of_heads, heads // len(of_heads), axis=0)
    return made


def score_bounds(shape: ModelShape, policy: QKPolicy, weights: Weights, heads: int) -> Array:
    """Return the largest possible |score| of each query head of a layer.

    Args:
        shape: sizes of the model.
        policy: kind of attention.
        weights: of the layer, by query heads.
        heads: query heads of the rank.
    """
    width = math.sqrt(shape.head_dim)
    if shape.qk_norm:
        query, key = (width * np.abs(weights[name]).max() for name in QUERY_KEY_NORM)
        return np.full(heads, query * key / width)
    of_norm = {name[len(NORM) :]: one for name, one in weights.items() if name.startswith(NORM)}
    inputs = NORMS[shape.norm].bound(shape.hidden_size, of_norm)
    rows = np.full(heads, inputs if policy.has_rows else 0.0)
    norms = HeadNorms(inputs, rows, rows)
    for adapter in policy.corrections:
        norms = adapter.bound(norms, weights)
    return norms.query * norms.key / width


def bound_at_start(shape: ModelShape, policy: QKPolicy) -> float | None:
    """Return the largest possible |score| of a model that starts; None: there is no bound.

    Args:
        shape: sizes of the model, and its parts.
        policy: kind of attention.
    """
    if not is_bounded(shape, policy):
        return None
    layer = weights_of_layers(tensors(shape, policy), shape, policy)[0]
    # What is drawn, A of low_rank, is multiplied by zeros or normalised.
    starts = {
        name: np.zeros(one.shape)
        if one.start == "fan_in"
        else np.broadcast_to(even_values(one.shape, one.start), one.shape)
        for name, one in layer.items()
    }
    heads = shape.num_attention_heads
    return float(
        score_bounds(shape, policy, by_heads(shape, policy, starts, heads), heads=heads).max()
    )


def held_within(
    limit: float, shape: ModelShape, policy: QKPolicy, values: Weights, heads: int
) -> dict[str, Array]:
    """Return those weights of a layer that change for its scores to be bounded by a limit.

    Of a head whose bound is above it, all adapters of queries and keys are multiplied by one
    factor, that of a key head being the least of its query heads'. Where model.qk_norm comes last,
    its gains are. What adapters cannot do, since they add or there are none, the norm before
    attention does: frozen rows alone then are within the limit.

    Args:
        limit: of |q·k| / √head_dim.
        shape: sizes of the model.
        policy: kind of attention.
        values: the weights in the shapes of the live ones.
        heads: query heads of the rank.

    Returns:
        {name: new values, in the shape of the live weight}.
    """
    weights = by_heads(shape, policy, values, heads)
    largest = score_bounds(shape, policy, weights, heads=heads).max()
    if largest <= limit * (1 + SLACK):
        return {}
    if shape.qk_norm:
        factor = math.sqrt(limit / largest)
        return {name: values[name] * factor for name in QUERY_KEY_NORM}
    found = _Heads(shape, policy, weights, heads=heads)
    made: dict[str, Array] = {}
    left = found.bounds(np.full(heads, NOTHING)).max()
    if left > limit:
        factor = math.sqrt(limit / left)
        made = {name: values[name] * factor for name in values if name.startswith(NORM)}
        found = _Heads(shape, policy, {**weights, **made}, heads=heads)
    return made | found.shrunk_within(limit, values)


@dataclass(frozen=True)
class _Heads:
    """Heads of a layer whose adapters are to be multiplied by factors."""

    shape: ModelShape
    policy: QKPolicy
    weights: Weights
    heads: int

    @property
    def shrinkable(self) -> dict[str, tuple[Adapter, AdapterWeight]]:
        """Return the tensors of adapters that belong to heads of queries or keys."""
        return {
            weight.name: (adapter, weight)
            for adapter in self.policy.corrections
            for weight in adapter.weights(adapter_sizes(self.shape, self.policy))
            if weight.role in ("query", "key")
        }

    def bounds(self, factors: Array) -> Array:
        """Return the bounds where each query head's tensors are multiplied by its factor."""
        shrunk = {
            name: adapter.shrunk(self.weights[name], _along(factors, self.weights[name]))
            for name, (adapter, _) in self.shrinkable.items()
        }
        return score_bounds(self.shape, self.policy, {**self.weights, **shrunk}, self.heads)

    def shrunk_within(self, limit: float, values: Weights) -> dict[str, Array]:
        """Return the tensors that change, in the shapes of the live ones.

        Args:
            limit: of the bounds.
            values: the weights in those shapes.
        """
        above = self.bounds(np.ones(self.heads)) > limit * (1 + SLACK)
        if not above.any():
            return {}
        least = np.where(above, NOTHING, 1.0)
        most = np.ones(self.heads)
        for _ in range(HALVINGS):
            middle = np.where(above, (least + most) / 2, 1.0)
            within = self.bounds(middle) <= limit
            least = np.where(within, middle, least)
            most = np.where(within, most, middle)
        made = {}
        for name, (adapter, weight) in self.shrinkable.items():
            own = values[name].reshape(-1, *weight.shape)
            factors = least.reshape(len(own), -1).min(axis=1)
            made[name] = adapter.shrunk(own, _along(factors, own)).reshape(values[name].shape)
        return made


def _along(factors: Array, weights: Array) -> Array:
    """Return factors of heads in a shape that multiplies weights of heads."""
    return factors.reshape(-1, *[1] * (weights.ndim - 1))


def largest_bound(
    shape: ModelShape, policy: QKPolicy, layers: Sequence[Weights], heads: int
) -> float:
    """Return the largest of all layers' bounds.

    Args:
        shape: sizes of the model.
        policy: kind of attention.
        layers: the weights of each in the shapes of the live ones.
        heads: query heads of the rank.
    """
    every = [
        score_bounds(shape, policy, by_heads(shape, policy, layer, heads), heads=heads).max()
        for layer in layers
    ]
    return float(max(every))
