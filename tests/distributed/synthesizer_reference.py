"""One Synthesizer layer in plain torch operations, and its sizes."""

from __future__ import annotations

import math

import torch

from tests.distributed.one_layer import BATCH, initial_rows, plain_layer
from tests.megatron_patches.models import HEADS

LENGTH, RANK, SEED = 12, 5, 7


def reference(
    x: torch.Tensor, output_grad: torch.Tensor, variant: str, groups: int, mask: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The whole layer, differentiated by autograd."""
    length = x.size(0)
    rank = rank_of(variant)

    def matrix(name: str, columns: int, std: float) -> torch.Tensor:
        rows = initial_rows(SEED, name, HEADS * LENGTH, columns=columns, std=std)
        return rows.view(HEADS, LENGTH, columns).requires_grad_()

    if rank is None:
        learned = {"scores": matrix("scores", LENGTH, 1.0)}
        logits = learned["scores"]
    else:
        learned = {name: matrix(name, rank, rank**-0.25) for name in ("query_factor", "key_factor")}
        logits = torch.einsum("hik,hjk->hij", learned["query_factor"], learned["key_factor"])
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).triu(1).expand(BATCH, 1, length, length)
    logits = logits[:, :length, :length].expand(BATCH, HEADS, length, length)
    probabilities = logits.masked_fill(mask, -math.inf).softmax(dim=-1)
    plain = plain_layer(x, output_grad, groups, SEED, probabilities=lambda _: probabilities)
    return plain | {name: weight.grad for name, weight in learned.items()}


def rank_of(variant: str) -> int | None:
    return RANK if variant.endswith("factorized") else None
