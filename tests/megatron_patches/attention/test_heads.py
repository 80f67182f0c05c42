"""Effective matrices and attention distributions of heads of the live model, against formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.heads import attention_observed, head_weights
from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.attention.synthesizer import SynthesizerCoreAttention
from megatron_patches.engine.documents import Documents
from tests.megatron_patches.attention.test_projections import dense, trained
from tests.megatron_patches.models import HEAD_DIM, HEADS, LAYERS, SEQ, build

BATCH = 2


def assert_effective(attention: Any) -> None:
    """The effective matrices `[heads, head_dim, hidden]` are the rows of the layer."""
    effective = head_weights(attention)
    assert effective is not None
    query, key = dense(attention.linear_qkv, trained(attention.linear_qkv))
    torch.testing.assert_close(effective.query, query.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(effective.key, key.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("variant", "groups", "axes"),
    [
        ("orthogonal", 2, {}),
        ("monarch", 4, {}),
        ("hybrid", 2, {"frozen_heads": (("0%-100%", 0.5),)}),
        ("orthogonal_shared", 2, {}),
    ],
)
def test_effective_matrices_are_the_rows_of_the_layer(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any]
) -> None:
    attention = build(variant, groups, torch.float64, **axes).decoder.layers[1].self_attention
    assert_effective(attention)


def test_biases_and_the_documents_of_an_earlier_text_are_no_part_of_them(
    one_rank: dist.ProcessGroup,
) -> None:
    adapters = ("query_key_bias", "short_convolution")
    model = build("orthogonal", 2, torch.float64, adapters=adapters, convolved="value")
    attention = model.decoder.layers[1].self_attention
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    documents = Documents(torch.tensor([[0] * 4 + [4] * (SEQ - 4)]))
    attention.linear_qkv.look_back_within(documents.with_boundaries())
    assert_effective(attention)


def test_scores_without_such_matrices_have_none(one_rank: dist.ProcessGroup) -> None:
    normalised = build("orthogonal", qk_norm=True).decoder.layers[0].self_attention
    learned = build("synthesizer_random").decoder.layers[0].self_attention
    assert head_weights(normalised) is None and head_weights(learned) is None


Seen = list[tuple[int, torch.Tensor, torch.Tensor | None]]


def hidden_by(documents: list[list[int]]) -> torch.Tensor:
    starts = torch.tensor(documents)
    other = starts[:, None, :, None] != starts[:, None, None, :]
    return other | torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("rotary", [None, RotaryAngles(HEAD_DIM, 100)])
@pytest.mark.parametrize("form", ["causal", "mask", "documents"])
def test_observed_distributions_and_scores_are_the_formulas(
    one_rank: dist.ProcessGroup, groups: int, rotary: RotaryAngles | None, form: str
) -> None:
    model = build("orthogonal", groups, rotary=rotary)
    core = model.decoder.layers[1].self_attention.core_attention
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(SEQ, BATCH, heads, HEAD_DIM, generator=generator)
        for heads in (HEADS, groups, groups)
    )
    places = [[0] * SEQ, [0] * 4 + [4] * (SEQ - 4)] if form != "causal" else [[0] * SEQ] * BATCH
    hidden = hidden_by(places)
    masks = {
        "causal": None,
        "mask": hidden,
        "documents": Documents(torch.tensor(places)).with_boundaries(),
    }
    seen: Seen = []
    unobserved = core(query, key, value, attention_mask=masks[form])
    with attention_observed(model, lambda *observed: seen.append(observed)):
        during = core(query, key, value, attention_mask=masks[form])
    core(query, key, value, attention_mask=masks[form])
    ((layer, probabilities, scores),) = seen  # in the context only, and not again for its own pass
    assert layer == 1 and torch.equal(unobserved, during)
    if rotary is not None:
        query = rotary.rotate(query)
        key = rotary.rotate(key)
    repeated = key.repeat_interleave(HEADS // groups, dim=2)
    expected = torch.einsum("sbhd,tbhd->bhst", query, repeated) / math.sqrt(HEAD_DIM)
    torch.testing.assert_close(scores, expected)
    softmax = expected.masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(probabilities, softmax)


def test_every_layer_is_observed_and_a_synthesizer_has_no_scores(
    one_rank: dist.ProcessGroup,
) -> None:
    model = build("synthesizer_random", groups=2)
    seen: Seen = []
    with attention_observed(model, lambda *observed: seen.append(observed)):
        for layer in model.decoder.layers:
            core = layer.self_attention.core_attention
            assert isinstance(core, SynthesizerCoreAttention)
            core(torch.randn(SEQ, BATCH, 2, HEAD_DIM), attention_mask=None)
    assert [layer for layer, _, _ in seen] == [*range(LAYERS)]
    for layer, probabilities, scores in seen:
        assert scores is None
        expected = model.decoder.layers[layer].self_attention.core_attention.probabilities(SEQ)
        torch.testing.assert_close(probabilities, expected.detach().expand(BATCH, -1, -1, -1))
