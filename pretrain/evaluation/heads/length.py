"""E5: perplexity at other lengths than the one trained on, of the very same predictions.

A span of 3·T + 1 held-out ids (T: the trained length) is cut into 6 blocks of T/2, 3 of T and 2 of 3T/2:
every length predicts the same 3·T tokens, each from what its own block has shown before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from data_pipeline.shards.samples import ValidationSamples
from megatron_patches.attention.heads import has_queries_and_keys
from pretrain.errors import UserError
from pretrain.evaluation.heads.trained_model import TrainedModel
from pretrain.model.build import token_losses
from pretrain.model.packing import document_layout

FACTORS = (0.5, 1.0, 1.5)
_BLOCKS_PER_SPAN = {0.5: 6, 1.0: 3, 1.5: 2}


@dataclass(frozen=True)
class LengthLoss:
    """Losses of one length, in nats, summed over all spans by place in the span.

    sums, counts: float64 `[3 * trained length]`: total loss, and how many predictions it is of. The same
    place is the same predictions at every length.
    """

    length: int
    sums: np.ndarray
    counts: np.ndarray

    @property
    def predictions(self) -> int:
        return round(self.counts.sum())

    @property
    def loss(self) -> float:
        """Mean over all predictions."""
        return float(self.sums.sum() / self.counts.sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def by_position(self) -> np.ndarray:
        """Mean loss of the predictions made from i + 1 ids, `[length]`."""
        sums, counts = (part.reshape(-1, self.length).sum(0) for part in (self.sums, self.counts))
        return np.asarray(sums / np.maximum(counts, 1))


@dataclass(frozen=True)
class RunLengths:
    """One run. `losses` has each of FACTORS that the model can do; `reasons` why it cannot do the others."""

    name: str
    group: str
    seed: int
    trained_length: int
    losses: Mapping[float, LengthLoss]
    reasons: Mapping[float, str]

    def change(self, factor: float) -> float | None:
        """Perplexity at `factor` times the trained length / perplexity at the trained length - 1."""
        if factor not in self.losses:
            return None
        return math.exp(self.losses[factor].loss - self.losses[1.0].loss) - 1

    def gain(self) -> np.ndarray:
        """What context gives, by position in the longest blocks: nats, `[their length]`, negative is better.

        The loss of every prediction minus the loss of the very same one in blocks of half the trained length
        T, whose boundaries are also boundaries of the longer blocks: so position i has seen i + 1 ids
        here and 1 + i mod T/2 there. 0 by construction up to T/2.
        """
        longest = self.losses[max(self.losses)]
        short = LengthLoss(longest.length, self.losses[0.5].sums, longest.counts)
        return longest.by_position() - short.by_position()


def measure_lengths(trained: TrainedModel, group: str, samples: int | None) -> RunLengths:
    """Losses at every length.

    Args:
        samples: spans per source; None: as many as hold data.validation_samples samples.

    Raises:
        UserError: the trained length is odd.
        DataError: a source has fewer held-out tokens than one span.
    """
    length = trained.config.data.sequence_length
    if length % 2:
        raise UserError(
            f"{trained.run.path}: data.sequence_length={length} is odd, so that half of it is no length; "
            "this evaluation needs an even one"
        )
    spans = samples or -(-trained.config.data.validation_samples // _BLOCKS_PER_SPAN[1.0])
    sources = trained.data.blend.validation_samples(3 * length, spans)
    reasons = {factor: reason for factor in FACTORS if (reason := why_not(trained, factor))}
    losses = {
        factor: _losses(trained, sources, round(factor * length))
        for factor in FACTORS
        if factor not in reasons
    }
    run = trained.run
    return RunLengths(run.name, group, run.seed, length, losses, reasons)


def why_not(trained: TrainedModel, factor: float) -> str | None:
    """Why the model cannot read `factor` times its trained length, or None if it can."""
    if factor <= 1.0:
        return None
    length = trained.config.data.sequence_length
    if trained.config.model.position_embedding == "learned":
        return f"there is no learned position beyond the {length} trained"
    if not all(has_queries_and_keys(layer.self_attention) for layer in trained.model.decoder.layers):
        return f"the score matrices have rows for the {length} trained positions only"
    return None


def _losses(trained: TrainedModel, sources: Mapping[str, ValidationSamples], length: int) -> LengthLoss:
    device = next(trained.model.parameters()).device
    span = 3 * trained.config.data.sequence_length
    sums, counts = np.zeros(span), np.zeros(span)
    at_once = max(1, trained.config.data.micro_batch_size // 3)  # as many ids as a training forward pass
    for samples in sources.values():
        for first in range(0, len(samples), at_once):
            spans = samples.blocks(np.arange(first, min(first + at_once, len(samples))))
            tokens = torch.from_numpy(cut(spans, length)).to(device)
            with torch.no_grad():
                losses = token_losses(trained.model, tokens, trained.data.boundary)
            counted = _counted(tokens, trained.data.boundary)
            sums += losses.double().cpu().numpy().reshape(-1, span).sum(0)
            counts += counted.cpu().numpy().reshape(-1, span).sum(0)
    return LengthLoss(length, sums, counts)


def cut(spans: np.ndarray, length: int) -> np.ndarray:
    """`[n, k·length + 1]` ids -> `[n·k, length + 1]`; neighbouring blocks share one id, as in training."""
    starts = np.arange(0, spans.shape[1] - 1, length)
    return spans[:, starts[:, None] + np.arange(length + 1)].reshape(-1, length + 1)


def _counted(tokens: torch.Tensor, boundary: int | None) -> torch.Tensor:
    inputs = tokens[:, :-1]
    return torch.ones_like(inputs) if boundary is None else document_layout(inputs, boundary).counted
