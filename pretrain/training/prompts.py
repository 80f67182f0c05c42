"""Prompts continued by the model as it is: `telemetry.sample_prompts`.

No second model and no cache of keys and values: for every token, each prompt goes through the live
model once more as a whole. Evaluation draws nothing and compiled layers run as they were written,
so the training after it has the bits that it would have without.
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

    All ranks make as many forward passes (ZeRO-3 gathers weights in each), and none stops before
    the others where its model ends a document.

    Args:
        engine: a deepspeed.DeepSpeedEngine, or a model.
        prompts: their ids, and how many tokens to add.
        config: of the run.
        boundary: the end-of-document id where documents stand alone.
        context: this rank's place in the layout.
        draw: chooses `[rows]` ids in place of the likeliest, from logits
            `[rows, vocabulary]` of one rank.
    """
    ids, ends = _block(prompts, config, context)
    # Not more tokens at a time than a forward pass of training has.
    rows = max(1, config.data.micro_batch_size * config.data.sequence_length // ids.size(1))
    engine.eval()
    with torch.no_grad(), compiling_nothing():
        for _ in range(prompts.tokens):
            parts = zip(ids.split(rows), (ends - 1).split(rows), strict=True)
            logits = torch.cat([logits_at(engine, inputs, at, boundary) for inputs, at in parts])
            chosen = draw(logits) if draw else likeliest(logits, context)
            ids.scatter_(1, ends[:, None], chosen[:, None])
            ends += 1
    engine.train()
    return tuple(_sample(prompts, number, row) for number, row in enumerate(ids.tolist()))


def _block(
    prompts: Prompts, config: Config, context: ParallelContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids `[prompts, length]` with room behind each prompt, and its start `[prompts]`.

    What stands in the room has no effect on what is before it. With sequence parallelism the length
    must divide; that of training does and is no less than what the prompts need.
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

    The tensor-parallel ranks exchange two numbers a row, and all have the same answer. Rows of the
    output layer without a token of the tokenizer have the logit −∞.

    Args:
        logits: `[rows, vocabulary / tensor-parallel ranks]`.
        context: this rank's place in the layout.
    """
    best, column = logits.double().max(dim=-1)
    if context.tensor_parallel_size == 1:
        return column
    own = torch.stack((best, (column + context.tensor_parallel_rank * logits.size(-1)).double()))
    parts = own.new_empty((context.tensor_parallel_size, *own.shape))
    dist.all_gather_into_tensor(
        parts.view(-1, own.size(1)), own, group=context.tensor_parallel_group
    )
    rank = parts[:, 0].argmax(dim=0, keepdim=True)
    return parts[:, 1].gather(0, rank)[0].long()


def _sample(prompts: Prompts, number: int, row: list[int]) -> Sample:
    start = len(prompts.ids[number])
    added = row[start : start + prompts.tokens]
    ended = prompts.eod_id in added
    if ended:
        added = added[: added.index(prompts.eod_id)]
    return Sample(prompts.texts[number], prompts.added(number, added), len(added), ended)
