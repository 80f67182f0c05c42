"""Prompts continued by the live model: `telemetry.sample_prompts`.

There is no second model and no cache of keys and values: for every new token, the live model runs
over each whole prompt again. Sampling draws no random numbers and runs the layers uncompiled, so
the training after it keeps every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pretrain.config.tree import Config
from pretrain.data.prompts import Prompts
from pretrain.model.build import compiling_nothing, logits_at
from pretrain.ranks.groups import ParallelContext
from pretrain.telemetry.records import Sample


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
