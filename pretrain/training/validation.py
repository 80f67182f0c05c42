"""Measurements of a validation: losses on held-out text, attention scores, prompts continued.

Prompts are continued by the live model, without a second model or a cache of keys and values: for
every new token it runs over each whole prompt again. Sampling draws no random numbers and runs the
layers uncompiled, so the training after it keeps every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patches.attention.heads import attention_observed
from pretrain.config.tree import Config
from pretrain.data.open import RunData
from pretrain.data.prompts import Prompts
from pretrain.model.build import compiling_nothing, logits_at, token_losses
from pretrain.model.packing import count_predictions, document_layout
from pretrain.ranks.groups import ParallelContext
from pretrain.telemetry.records import AttentionScores, HeldOutLosses, Sample


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
    first = (index - document_layout(inputs, boundary).positions)[:, None, :, None]
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


def continue_prompts(
    engine: Any,
    prompts: Prompts,
    config: Config,
    boundary: int | None,
    context: ParallelContext,
    draw: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[Sample, ...]:
    """Continue each prompt by its likeliest next token, `prompts.tokens` times (collective).

    All ranks make the same number of forward passes (ZeRO-3 gathers weights in each), so none stops
    early where a document ends.

    Args:
        engine: A deepspeed.DeepSpeedEngine, or a model.
        prompts: Ids of the prompts, and the number of tokens to add.
        boundary: The end-of-document id if documents stand alone.
        draw: Chooses `[rows]` ids in place of the likeliest, from logits `[rows, vocabulary]` of
            one rank.
    """
    ids, ends = _block(prompts, config, context)
    # At most as many tokens at a time as a forward pass of training, whose memory is sure to fit.
    rows = max(1, config.data.micro_batch_size * config.data.sequence_length // ids.size(1))
    engine.eval()
    with torch.no_grad(), compiling_nothing():
        for _ in range(prompts.tokens):
            batches = zip(ids.split(rows), (ends - 1).split(rows), strict=True)
            logits = torch.cat([logits_at(engine, inputs, at, boundary) for inputs, at in batches])
            chosen = draw(logits) if draw else likeliest(logits, context)
            ids.scatter_(1, ends[:, None], chosen[:, None])
            ends += 1
    engine.train()
    return tuple(_sample(prompts, number, row) for number, row in enumerate(ids.tolist()))


def _block(
    prompts: Prompts, config: Config, context: ParallelContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids `[prompts, length]`, padded for the continuations, and ends `[prompts]`.

    Attention is causal, so the padding has no effect on the prompts. With sequence parallelism the
    length must be a multiple of the tensor-parallel size.
    """
    length = max(map(len, prompts.ids)) + prompts.tokens
    if config.parallel.sequence_parallel:
        length += -length % context.tensor_parallel_size
    ids = torch.zeros(len(prompts.ids), length, dtype=torch.int64)
    for row, prompt in zip(ids, prompts.ids, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    ends = torch.tensor([len(prompt) for prompt in prompts.ids])
    return ids.to(context.device), ends.to(context.device)


def likeliest(logits: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Return `[rows]` ids of the largest logits, the first of equal ones (collective).

    The tensor-parallel ranks exchange two numbers per row and all get the same ids. Rows of the
    output layer that no token of the tokenizer uses have the logit −∞.

    Args:
        logits: `[rows, vocabulary / tensor-parallel ranks]`.
    """
    best, column = logits.double().max(dim=-1)
    if context.tensor_parallel_size == 1:
        return column
    candidates = torch.stack(
        (best, (column + context.tensor_parallel_rank * logits.size(-1)).double())
    )
    gathered = candidates.new_empty((context.tensor_parallel_size, *candidates.shape))
    dist.all_gather_into_tensor(
        gathered.view(-1, candidates.size(1)), candidates, group=context.tensor_parallel_group
    )
    rank = gathered[:, 0].argmax(dim=0, keepdim=True)
    return gathered[:, 1].gather(0, rank)[0].long()


def _sample(prompts: Prompts, number: int, row: list[int]) -> Sample:
    start = len(prompts.ids[number])
    added = row[start : start + prompts.tokens]
    ended = prompts.eod_id in added
    if ended:
        added = added[: added.index(prompts.eod_id)]
    return Sample(prompts.texts[number], prompts.added(number, added), len(added), ended)
