"""The core attention against its formula, with groups and with a mask."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.scores import CausalDotProductAttention
from tests.megatron_patches.models import HEAD_DIM, HEADS, SEQ, build

BATCH = 2


def core() -> CausalDotProductAttention:
    found = build("vanilla", dtype=torch.float64).decoder.layers[0].self_attention.core_attention
    assert isinstance(found, CausalDotProductAttention)
    return found


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    key, value = (one.repeat_interleave(HEADS // one.size(2), dim=2) for one in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(HEAD_DIM)
    probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", probabilities, value).flatten(2)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_context_is_the_formulas(one_rank: dist.ProcessGroup, groups: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(SEQ, BATCH, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, groups, groups)
    )
    future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1).expand(BATCH, 1, SEQ, SEQ)
    hidden = future.clone()
    if masked:
        hidden[1, :, 4:, :4] = True  # a new document begins at position 4 of the second sample
    ours = core()(query, key, value, hidden if masked else None)
    torch.testing.assert_close(ours, formula(query, key, value, hidden), rtol=1e-12, atol=1e-12)
