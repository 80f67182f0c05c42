"""Learned score matrices on one rank: probabilities, lengths, what trains."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.synthesizer import SynthesizerCoreAttention
from megatron_patches.errors import MethodError
from tests.megatron_patches.models import HEAD_DIM, HEADS, SEQ, build

VARIANTS = ("synthesizer_random", "synthesizer_factorized")


def core(variant: str, groups: int = HEADS, **axes: object) -> SynthesizerCoreAttention:
    found = build(variant, groups, torch.float64, **axes).decoder.layers[1].self_attention.core_attention
    assert isinstance(found, SynthesizerCoreAttention)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_probabilities_sum_to_one_over_the_past_of_any_length(
    one_rank: dist.ProcessGroup, variant: str
) -> None:
    attention = core(variant)
    for length in (1, 7, SEQ):
        found = attention.probabilities(length)
        assert found.shape == (HEADS, length, length)
        torch.testing.assert_close(found.sum(-1), torch.ones(HEADS, length, dtype=torch.float64))
        assert torch.count_nonzero(found.triu(1)) == 0
        corner = attention.logits(SEQ)[:, :length, :length]
        torch.testing.assert_close(attention.logits(length), corner, rtol=1e-12, atol=1e-12)
    with pytest.raises(MethodError, match=f"an input of {SEQ + 1} positions is longer than the {SEQ}"):
        attention.logits(SEQ + 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("groups", [4, 2])
def test_context_is_the_mean_of_values_by_those_probabilities(
    one_rank: dist.ProcessGroup, variant: str, groups: int
) -> None:
    attention = core(variant, groups)
    value = torch.randn(SEQ, 3, groups, HEAD_DIM, dtype=torch.float64)
    repeated = value.repeat_interleave(HEADS // groups, dim=2)
    expected = torch.einsum("hst,tbhd->sbhd", attention.probabilities(SEQ), repeated).flatten(2)
    torch.testing.assert_close(attention(value, None), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_train_and_are_saved_or_are_frozen_and_regenerated(
    one_rank: dist.ProcessGroup, variant: str
) -> None:
    trained, frozen = core(variant), core(variant, trainable=False)
    names = set(trained.recipe.matrices)
    assert {name for name, _ in trained.named_parameters()} == names == set(trained.state_dict())
    assert list(trained.frozen_shards()) == []
    assert not list(frozen.parameters()) and not frozen.state_dict()
    shards = {name: rows for name, _, rows in frozen.frozen_shards()}
    assert shards.keys() == names
    assert all(torch.equal(rows, getattr(trained, name)) for name, rows in shards.items())
