"""Learned score matrices on one rank: probabilities, lengths, what trains."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.synthesizer import SynthesizerCoreAttention
from megatron_patches.errors import MethodError
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, SEQ, build

VARIANTS = ("synthesizer_random", "synthesizer_factorized")


def core(variant: str, groups: int = HEADS, **axes: object) -> SynthesizerCoreAttention:
    module = (
        build(variant, groups, torch.float64, **axes)
        .decoder.layers[1]
        .self_attention.core_attention
    )
    assert isinstance(module, SynthesizerCoreAttention)
    return module


@pytest.mark.parametrize("variant", VARIANTS)
def test_probabilities_sum_to_one_over_the_past_of_any_length(
    one_rank: dist.ProcessGroup, variant: str
) -> None:
    attention = core(variant)
    for length in (1, 7, SEQ):
        probabilities = attention.probabilities(length)
        assert probabilities.shape == (HEADS, length, length)
        torch.testing.assert_close(
            probabilities.sum(-1), torch.ones(HEADS, length, dtype=torch.float64)
        )
        assert torch.count_nonzero(probabilities.triu(1)) == 0
        corner = attention.logits(SEQ)[:, :length, :length]
        torch.testing.assert_close(attention.logits(length), corner, rtol=1e-12, atol=1e-12)
    refusal = (
        f"an input of {SEQ + 1} positions is longer than the {SEQ} that the learned score matrices "
        "have rows for; shorten it, or train with that data.sequence_length"
    )
    with pytest.raises(MethodError, match=refusal):
        attention.logits(SEQ + 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_train_and_are_saved_or_are_frozen_and_regenerated(
    one_rank: dist.ProcessGroup, variant: str
) -> None:
    trained = core(variant)
    frozen = core(variant, trainable=False)
    names = set(trained.recipe.matrices)
    assert {name for name, _ in trained.named_parameters()} == names == set(trained.state_dict())
    assert list(trained.frozen_shards()) == []
    assert not list(frozen.parameters()) and not frozen.state_dict()
    shards = {name: rows for name, _, rows in frozen.frozen_shards()}
    assert shards.keys() == names
    assert all(torch.equal(rows, getattr(trained, name)) for name, rows in shards.items())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("groups", [4, 2])
def test_a_layer_is_its_formula_with_documents_and_without(
    one_rank: dist.ProcessGroup, variant: str, groups: int
) -> None:
    layer = build(variant, groups, torch.float64).decoder.layers[0].self_attention
    hidden_states = torch.randn(SEQ, 2, HIDDEN, dtype=torch.float64)
    value = (hidden_states @ layer.linear_v.weight.t()).unflatten(-1, (groups, HEAD_DIM))
    repeated = value.repeat_interleave(HEADS // groups, dim=2)
    future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1).repeat(2, 1, 1, 1)
    documents = future.clone()
    documents[1, :, 4:, :4] = True
    for mask, hidden in ((None, future), (documents, documents)):
        logits = layer.core_attention.logits(SEQ).masked_fill(hidden, -math.inf)
        mixed = torch.einsum("bhst,tbhd->sbhd", logits.softmax(-1), repeated).flatten(2)
        ours, bias = layer(hidden_states, mask)
        assert bias is None
        expected = mixed @ layer.linear_proj.weight.t()
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_every_sample_drops_probabilities_of_its_own(one_rank: dist.ProcessGroup) -> None:
    attention = core("synthesizer_random")
    attention.dropout = 0.5
    probabilities = attention.probabilities(SEQ)
    dropped = attention._drop(probabilities, 3)
    assert dropped.shape == (3, HEADS, SEQ, SEQ)
    of_samples = probabilities.expand(3, -1, -1, -1)  # as they are under a mask
    assert attention._drop(of_samples, 3).shape == dropped.shape
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], (2 * probabilities).expand(3, -1, -1, -1)[kept])
    assert not torch.equal(kept[0], kept[1])
    value = torch.randn(SEQ, 3, HEADS, HEAD_DIM, dtype=torch.float64)
    quiet = attention.eval()(value, None)
    assert not torch.allclose(attention.train()(value, None), quiet)
    attention.dropout = 0.0
    assert torch.equal(attention(value, None), quiet)
