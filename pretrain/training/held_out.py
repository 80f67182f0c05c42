"""Loss on held-out text, source by source, and each layer's attention on a sample of it."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patches.attention.heads import attention_observed
from pretrain.data.open import RunData
from pretrain.model.build import compiling_nothing, token_losses
from pretrain.model.packing import count_predictions, document_layout
from pretrain.ranks.groups import ParallelContext
from pretrain.telemetry.records import AttentionScores, HeldOutLosses


def held_out_losses(
    engine: Any, data: RunData, micro_batch_size: int, context: ParallelContext
) -> HeldOutLosses:
    """Return the total loss on each source's held-out samples (collective).

    The samples are the same every time, and dropout is off.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
        micro_batch_size: Samples of a forward pass.

    Returns:
        {source: (total loss in nats, number of predictions)}.
    """
    engine.eval()
    totals = torch.zeros(len(data.validation), 2, dtype=torch.float64, device=context.device)
    micro_batch = np.arange(micro_batch_size)
    for total, samples in zip(totals, data.validation.values(), strict=True):
        # Every rank makes the same number of forward passes (ZeRO-3 gathers weights in each), so a
        # share that comes out short is filled with sample 0 at weight zero.
        for first in range(0, len(samples), len(micro_batch) * context.data_parallel_size):
            numbers = first + context.data_parallel_rank * len(micro_batch) + micro_batch
            real = numbers < len(samples)
            tokens = torch.from_numpy(samples.blocks(np.where(real, numbers, 0)))
            with torch.no_grad():
                losses = token_losses(engine, tokens.to(context.device), data.boundary)
            weights = torch.from_numpy(real.astype(np.float64)).to(context.device)
            total[0] += losses.sum(dim=1, dtype=torch.float64) @ weights
            total[1] += count_predictions(tokens[torch.from_numpy(real)], data.boundary)
    engine.train()
    dist.all_reduce(totals)
    totals /= context.tensor_parallel_size  # tensor-parallel ranks counted the same samples
    return {
        source: (loss, round(count))
        for source, (loss, count) in zip(data.validation, totals.tolist(), strict=True)
    }


def _visible(inputs: torch.Tensor, boundary: int | None) -> torch.Tensor:
    """Return a mask `[batch, 1, query, key]` of the keys that each query sees.

    Args:
        inputs: Ids `[batch, sequence]`.
        boundary: The end-of-document id if documents stand alone; None: the batch is one text.
    """
    index = torch.arange(inputs.size(1), device=inputs.device)
    positions = index.expand_as(inputs)
    if boundary is not None:
        positions = document_layout(inputs, boundary).positions
    first = (index - positions)[:, None, :, None]
    return (index <= index[:, None]) & (index >= first)


def spread_of_scores(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return each query's standard deviation over the keys that it sees, `[…, query]`.

    Args:
        scores: `[…, query, key]`.
        visible: Mask of the keys that count, broadcast to the scores.
    """
    seen = visible.sum(dim=-1).double()
    mean = scores.where(visible, 0.0).sum(dim=-1, dtype=torch.float64) / seen
    squares = (scores.double() - mean[..., None]).square()
    return (squares.where(visible, 0.0).sum(dim=-1) / seen).sqrt()


def _measured(
    probabilities: torch.Tensor, scores: torch.Tensor | None, visible: torch.Tensor
) -> torch.Tensor:
    """Return the entropy, the spread and the largest score of a head, float64 `[3]`.

    Heads are measured one at a time, because this takes eight times their probabilities' memory.

    Args:
        probabilities: `[batch, query, key]`.
        scores: `[batch, query, key]`; None for a synthesizer, whose scores are known only up to a
            constant for each query.
        visible: Mask of the keys that count, `[batch, query, key]`.
    """
    above = probabilities > 0
    logs = probabilities.log().where(above, 0.0)
    entropy = -(probabilities * logs).sum(dim=-1)
    if scores is None:
        largest = torch.tensor(torch.nan)
        spread = spread_of_scores(logs, above)
    else:
        largest = scores.where(visible, -torch.inf).max()
        spread = spread_of_scores(scores, visible)
    return torch.stack([part.double().mean() for part in (entropy, spread, largest.to(entropy))])


def attention_scores(
    engine: Any, data: RunData, context: ParallelContext
) -> tuple[AttentionScores, ...]:
    """Return each layer's attention on the first held-out sample (collective).

    Runs one sample forward without dropout and with layers uncompiled, so that the numbers are the
    same under every layout. Holds one layer's probabilities at a time, float32 `[heads, sequence,
    sequence]` of this rank's heads.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
    """
    samples = next(samples for samples in data.validation.values() if len(samples))
    tokens = torch.from_numpy(samples.blocks(np.zeros(1, dtype=np.int64))).to(context.device)
    visible = _visible(tokens[:, :-1], data.boundary)
    layers: list[torch.Tensor] = []

    def observe(_: int, probabilities: torch.Tensor, scores: torch.Tensor | None) -> None:
        heads = probabilities.unbind(1)
        head_scores = [None] * len(heads) if scores is None else scores.unbind(1)
        measured = [
            _measured(head, of_head, visible[:, 0])
            for head, of_head in zip(heads, head_scores, strict=True)
        ]
        means, largest = torch.stack(measured).split((2, 1), dim=1)
        layers.append(torch.cat((means.mean(dim=0), largest.amax(dim=0))))

    engine.eval()
    with torch.no_grad(), compiling_nothing(), attention_observed(engine.module, observe):
        token_losses(engine, tokens, data.boundary)
    engine.train()
    means, largest = (part.contiguous() for part in torch.stack(layers).split((2, 1), dim=1))
    if context.tensor_parallel_size > 1:
        dist.all_reduce(means, group=context.tensor_parallel_group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=context.tensor_parallel_group)
    means /= context.tensor_parallel_size
    numbers = torch.cat((means, largest), dim=1).tolist()
    return tuple(
        AttentionScores(entropy, spread, None if isnan(score) else score)
        for entropy, spread, score in numbers
    )
