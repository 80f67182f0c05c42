"""One Synthesizer layer in plain torch operations, and its sizes."""

from __future__ import annotations

import math

import torch

from megatron_patches.engine.random_streams import normal_rows
from tests.distributed.one_layer import BATCH
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN

LENGTH, RANK, SEED = 12, 5, 7


def reference(
    x: torch.Tensor, output_grad: torch.Tensor, variant: str, groups: int, mask: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The whole layer in plain torch operations on full weights, differentiated by autograd."""
    length = x.size(0)
    x = x.clone().requires_grad_()
    rank = rank_of(variant)

    def matrix(name: str, columns: int, std: float) -> torch.Tensor:
        rows = normal_rows(
            SEED, f"layer.0.attention.{name}", rows=range(HEADS * LENGTH), columns=columns, std=std
        )
        return rows.double().view(HEADS, LENGTH, columns).requires_grad_()

    if rank is None:
        learned = {"scores": matrix("scores", LENGTH, 1.0)}
        logits = learned["scores"]
    else:
        learned = {name: matrix(name, rank, rank**-0.25) for name in ("query_factor", "key_factor")}
        logits = torch.einsum("hik,hjk->hij", learned["query_factor"], learned["key_factor"])
    value_rows = range(groups * HEAD_DIM)
    value_weight = normal_rows(
        SEED, "layer.0.attention.value", rows=value_rows, columns=HIDDEN, std=0.02
    ).double()
    value_weight.requires_grad_()
    std = 0.02 / math.sqrt(2)
    proj = normal_rows(
        SEED, "layer.0.attention.proj", rows=range(HIDDEN), columns=HEADS * HEAD_DIM, std=std
    ).double()

    value = (
        (x @ value_weight.t())
        .unflatten(-1, (groups, HEAD_DIM))
        .repeat_interleave(HEADS // groups, dim=2)
    )
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).triu(1).expand(BATCH, 1, length, length)
    logits = logits[:, :length, :length].expand(BATCH, HEADS, length, length)
    probabilities = logits.masked_fill(mask, -math.inf).softmax(dim=-1)
    mixed = torch.einsum("bhst,tbhd->sbhd", probabilities, value).flatten(2)
    output = mixed @ proj.t()
    output.backward(output_grad)
    gradients = {name: weight.grad for name, weight in learned.items()}
    return {"output": output, "input": x.grad, "value": value_weight.grad, **gradients}


def rank_of(variant: str) -> int | None:
    return RANK if variant.endswith("factorized") else None
