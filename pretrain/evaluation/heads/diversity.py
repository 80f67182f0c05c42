"""E4: do the heads of a layer look at different things? Of their weights, and of what they attend to.

Every run is measured as trained and, as a reference, as it was initialised: what holds before the first step
is no merit of training.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from megatron_patches.attention.heads import attention_observed, head_weights
from pretrain.data.open import RunData
from pretrain.evaluation.heads.measures import (
    between_heads,
    entropy,
    flat_cosines,
    pairwise_divergence,
    principal_angles,
    row_cosines,
)
from pretrain.model.build import token_losses
from pretrain.model.packing import document_layout


@dataclass(frozen=True)
class WeightDiversity:
    """Between different heads of one role in one layer; cosines without sign, angles in degrees."""

    cosine_mean: float
    cosine_max: float
    row_cosine_mean: float
    row_cosine_max: float
    angle_smallest: float
    angle_mean: float
    overlap: float
    """Mean cos² of the principal angles; head_dim / hidden_size for random subspaces."""


@dataclass(frozen=True)
class LayerDiversity:
    """One layer. A role's entry is None where it has no such matrices, or fewer than two heads.

    `divergence` (None of one head) and `entropy` are in nats, means over positions that see two keys or more;
    `relative_entropy` is entropy / ln(visible keys), 1 for uniform attention.
    """

    query: WeightDiversity | None
    key: WeightDiversity | None
    divergence: float | None
    entropy: float
    relative_entropy: float

    @property
    def cosine_max(self) -> float | None:
        found = [role.cosine_max for role in (self.query, self.key) if role is not None]
        return max(found) if found else None


def measure_diversity(model: GPTModel, data: RunData, samples: int) -> list[LayerDiversity]:
    """Every layer of a model on one process, on the first `samples` held-out samples of each source."""
    attention = _Attention(len(model.decoder.layers))
    device = next(model.parameters()).device
    for source in data.validation.values():
        for number in range(min(samples, len(source))):
            tokens = torch.from_numpy(source.blocks(np.array([number]))).to(device)
            attention.watch(model, tokens, data.boundary)
    return [attention.layer(index, layer.self_attention) for index, layer in enumerate(model.decoder.layers)]


def _weights(attention: Any) -> tuple[WeightDiversity | None, WeightDiversity | None]:
    weights = head_weights(attention)
    if weights is None:
        return None, None
    return weight_diversity(weights.query), weight_diversity(weights.key)


def weight_diversity(weights: torch.Tensor) -> WeightDiversity | None:
    """Of `[heads, head_dim, hidden]` float64; None of one head."""
    if len(weights) < 2:
        return None
    cosines = between_heads(flat_cosines(weights)).abs()
    rows = between_heads(row_cosines(weights)).abs()
    angles = between_heads(principal_angles(weights))
    return WeightDiversity(
        cosine_mean=float(cosines.mean()),
        cosine_max=float(cosines.max()),
        row_cosine_mean=float(rows.mean()),
        row_cosine_max=float(rows.max()),
        angle_smallest=float(angles.min()),
        angle_mean=float(angles.mean()),
        overlap=float(torch.deg2rad(angles).cos().square().mean()),
    )


class _Attention:
    """Sums over positions of what the layers attend to."""

    def __init__(self, num_layers: int) -> None:
        self._sums = np.zeros((num_layers, 3))
        self._positions = 0
        self._one_head = False

    def watch(self, model: GPTModel, tokens: torch.Tensor, boundary: int | None) -> None:
        """Take in one forward pass of `[batch, seq + 1]` ids."""
        inputs = tokens[:, :-1]
        visible = torch.arange(1, inputs.size(1) + 1, device=tokens.device).expand_as(inputs)
        if boundary is not None:
            visible = document_layout(inputs, boundary).positions + 1
        several = visible >= 2

        def observe(layer: int, probabilities: torch.Tensor) -> None:
            heads = probabilities.size(1)
            self._one_head |= heads == 1
            divergence = pairwise_divergence(probabilities).sum((-1, -2)) / max(1, heads * (heads - 1))
            nats = entropy(probabilities).mean(1)
            relative = nats / visible.clamp(min=2).log()
            for column, values in enumerate((divergence, nats, relative)):
                self._sums[layer, column] += float(values[several].sum(dtype=torch.float64))

        self._positions += int(several.sum())
        with torch.no_grad(), attention_observed(model, observe):
            token_losses(model, tokens, boundary)

    def layer(self, index: int, attention: Any) -> LayerDiversity:
        """What one layer came to, its weights included."""
        divergence, nats, relative = (self._sums[index] / self._positions).tolist()
        query, key = _weights(attention)
        return LayerDiversity(query, key, None if self._one_head else divergence, nats, relative)


@dataclass(frozen=True)
class RunDiversity:
    """One run, layer by layer."""

    name: str
    group: str
    seed: int
    trained: Sequence[LayerDiversity]
    untrained: Sequence[LayerDiversity]


def summary(layers: Sequence[LayerDiversity]) -> Mapping[str, float | None]:
    """One number a measure: the worst or the mean over layers and roles; None where it does not apply."""
    roles = [role for layer in layers for role in (layer.query, layer.key) if role is not None]
    divergences = [layer.divergence for layer in layers if layer.divergence is not None]
    return {
        "cosine_max": max((role.cosine_max for role in roles), default=None),
        "cosine_mean": statistics.mean(role.cosine_mean for role in roles) if roles else None,
        "row_cosine_max": max((role.row_cosine_max for role in roles), default=None),
        "angle_smallest": min((role.angle_smallest for role in roles), default=None),
        "angle_mean": statistics.mean(role.angle_mean for role in roles) if roles else None,
        "overlap": statistics.mean(role.overlap for role in roles) if roles else None,
        "divergence": statistics.mean(divergences) if divergences else None,
        "entropy": statistics.mean(layer.entropy for layer in layers),
        "relative_entropy": statistics.mean(layer.relative_entropy for layer in layers),
    }
