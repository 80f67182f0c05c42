"""The passes of the compiled loss give what the eager one's do, padded vocabulary included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from megatron_patches.model import output

TOKENS, ROWS, WIDTH = 12, 40, 8
PLAIN = output.LogitTerms()
ONE_RANK: Any = SimpleNamespace(size=lambda: 1)


@pytest.mark.parametrize("pieces", [ROWS, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_losses_and_gradients_are_those_of_the_slices(
    dtype: torch.dtype, tolerance: float, pieces: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = (4 * torch.randn(TOKENS, WIDTH, generator=generator)).to(dtype)
    weight = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    columns = torch.randint(pieces, (TOKENS,), generator=generator)
    owned = torch.rand(TOKENS, generator=generator) < 0.8

    sliced = inputs @ weight.t()
    at_label, log_share = output._in_slices(
        inputs,
        weight,
        logits=sliced,
        columns=columns,
        pieces=pieces,
        with_gradients=True,
        terms=PLAIN,
    )
    output._finish_gradient(
        sliced, torch.zeros(TOKENS), owned=owned, columns=columns, tp_group=ONE_RANK
    )

    logits = inputs @ weight.t()
    normaliser = output._log_sum(logits, pieces, PLAIN)
    torch.testing.assert_close(normaliser.double(), at_label - log_share, rtol=1e-6, atol=1e-6)
    exact = torch.logsumexp(logits[:, :pieces].double(), -1)
    torch.testing.assert_close(normaliser.double(), exact, rtol=1e-6, atol=1e-6)
    output._to_gradient(
        logits, normaliser, owned=owned, columns=columns, pieces=pieces, terms=PLAIN
    )
    torch.testing.assert_close(logits, sliced, rtol=tolerance, atol=tolerance)
    assert logits.dtype == dtype and not logits[:, pieces:].any()
    assert (logits.float().sum(-1)[owned].abs() < 20 * tolerance).all()  # p − 1[v = y] sums to 0


@pytest.mark.parametrize("terms", [(5.0, 0.0), (None, 0.1), (5.0, 0.1)])
@pytest.mark.parametrize(
    ("in_place", "passes"),
    [(True, None), (True, (output._log_sum, output._to_gradient)), (False, None)],
)
def test_soft_cap_and_z_loss_are_those_of_the_formula(
    in_place: bool, passes: Any, terms: tuple[float | None, float], one_rank: dist.ProcessGroup
) -> None:
    generator = torch.Generator().manual_seed(5)
    softcap, z_loss = terms
    pieces = 33
    inputs = 4 * torch.randn(TOKENS, 1, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(pieces, (TOKENS,), generator=generator)
    scale = torch.rand(TOKENS, generator=generator, dtype=torch.float64)

    mine = [inputs.clone().requires_grad_(), weight.clone().requires_grad_()]
    losses, normalisers = output._TokenLosses.apply(
        mine[0],
        mine[1],
        labels,
        one_rank,
        False,
        in_place,
        pieces,
        passes,
        output.LogitTerms(softcap, z_loss),
        True,
    )
    (losses * scale).sum().backward()

    plain = [inputs.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = (plain[0].flatten(0, 1) @ plain[1].t())[:, :pieces]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    squares = logits.logsumexp(-1).square()
    ((cross_entropy + z_loss * squares) * scale).sum().backward()
    torch.testing.assert_close(losses, cross_entropy, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(normalisers.square(), squares, rtol=1e-9, atol=1e-9)
    for ours, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-9, atol=1e-9)


def test_losses_without_gradients_make_none(one_rank: dist.ProcessGroup) -> None:
    def fail(*unused: object, **ignored: object) -> Any:
        raise AssertionError("a pass of training")

    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, perform_initialization=False
    )
    layer = output.OutputLayer(
        config, ROWS, pieces=33, tied=False, tp_group=one_rank, in_place=True, terms=PLAIN
    )
    layer.passes = fail, fail
    torch.nn.init.normal_(layer.weight)
    inputs = torch.randn(TOKENS, 1, WIDTH)
    labels = torch.arange(TOKENS)[None]
    with torch.no_grad():
        losses, _ = layer(inputs, labels=labels)
    logits = (inputs[:, 0] @ layer.weight.t())[:, :33]
    expected = torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")
    torch.testing.assert_close(losses[0], expected)
    with pytest.raises(AssertionError, match="a pass of training"):
        layer(inputs, labels=labels)
