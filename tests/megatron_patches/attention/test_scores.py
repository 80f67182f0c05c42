"""The core attention against its formula, with groups and with a mask."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.attention.scores import CausalDotProductAttention
from megatron_patches.engine.documents import Documents
from tests.megatron_patches.models import HEAD_DIM, HEADS, SEQ, build

BATCH = 2


def core() -> CausalDotProductAttention:
    module = build("vanilla", dtype=torch.float64).decoder.layers[0].self_attention.core_attention
    assert isinstance(module, CausalDotProductAttention)
    return module


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    key, value = (heads.repeat_interleave(HEADS // heads.size(2), dim=2) for heads in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(HEAD_DIM)
    probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", probabilities, value).flatten(2)


def heads(groups: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    sizes = (HEADS, groups, groups)
    return tuple(
        torch.randn(SEQ, BATCH, count, HEAD_DIM, generator=generator, dtype=torch.float64)
        for count in sizes
    )


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("form", ["causal", "mask", "documents"])
def test_context_is_the_formulas(one_rank: dist.ProcessGroup, groups: int, form: str) -> None:
    starts = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    if form != "causal":  # documents of one token and of several in the second sample
        starts[1, 3:], starts[1, 4:] = 3, 4
    documents = Documents(starts).with_boundaries()
    hidden = documents.mask()
    ours = core()(*heads(groups), {"causal": None, "mask": hidden, "documents": documents}[form])
    expected = formula(*heads(groups), hidden)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_dropped_probabilities_are_drawn_in_training_only(one_rank: dist.ProcessGroup) -> None:
    attention = core()
    drawn = heads(4)
    starts = Documents(torch.zeros(BATCH, SEQ, dtype=torch.int64)).with_boundaries()
    attention.dropout = 0.5
    kept = {visible: attention.eval()(*drawn, visible) for visible in (None, starts)}
    torch.testing.assert_close(kept[None], kept[starts])
    for visible, whole in kept.items():
        assert not torch.allclose(attention.train()(*drawn, visible), whole)


@pytest.mark.parametrize("rotary", [None, RotaryAngles(HEAD_DIM, 100)])
def test_queries_and_keys_that_backward_makes_anew_give_the_same_gradients(
    one_rank: dist.ProcessGroup, rotary: RotaryAngles | None
) -> None:
    attention = core()
    attention.rotary = rotary
    gradients, calls = [], []
    for again in (False, True):
        query, key, value = (tensor.requires_grad_() for tensor in heads(4))

        def recompute(
            query: torch.Tensor = query, key: torch.Tensor = key
        ) -> tuple[torch.Tensor, ...]:
            calls.append(torch.is_grad_enabled())
            return query.detach(), key.detach()

        attention.recompute_query_key = recompute if again else None
        attention(query, key, value, None).square().sum().backward()
        gradients.append((query.grad, key.grad, value.grad))
        assert attention.recompute_query_key is None  # for one pass
    assert calls == [False]
    for kept, anew in zip(*gradients, strict=True):
        assert torch.equal(kept, anew)


@pytest.mark.parametrize("masked", [False, True])
def test_the_largest_scores_of_training_are_noted(
    one_rank: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    monkeypatch.setattr("megatron_patches.attention.scores.QUERIES_AT_A_TIME", 3)
    query, key, value = heads(2)
    length, batch = query.shape[:2]
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    if masked:
        unseen[4:, :4] = True
    mask = unseen.expand(batch, 1, -1, -1) if masked else None
    attention = core()
    attention.largest = torch.full((query.size(2),), -torch.inf)
    attention.eval()(query, key, value, mask)
    assert attention.largest.isinf().all()  # only what trains counts
    attention.train()(query, key, value, mask)
    every = key.repeat_interleave(query.size(2) // 2, dim=2)
    scores = torch.einsum("qbhd,kbhd->bhqk", query, every) * attention.scale
    expected = scores.masked_fill(unseen, -torch.inf).amax(dim=(0, 2, 3)).float()
    assert torch.allclose(attention.largest, expected.detach(), rtol=1e-5)
    attention(0.5 * query, key, value, mask)
    assert torch.allclose(attention.largest, expected.detach(), rtol=1e-5)
