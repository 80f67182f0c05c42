"""The passes of the compiled loss give what the eager one's do, padded vocabulary included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.model import output

TOKENS, ROWS, WIDTH = 12, 40, 8
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
        inputs, weight, logits=sliced, columns=columns, pieces=pieces, with_gradients=True
    )
    output._finish_gradient(
        sliced, torch.zeros(TOKENS), owned=owned, columns=columns, tp_group=ONE_RANK
    )

    logits = inputs @ weight.t()
    normaliser = output._log_sum(logits, pieces)
    torch.testing.assert_close(normaliser.double(), at_label - log_share, rtol=1e-6, atol=1e-6)
    exact = torch.logsumexp(logits[:, :pieces].double(), -1)
    torch.testing.assert_close(normaliser.double(), exact, rtol=1e-6, atol=1e-6)
    output._to_gradient(logits, normaliser, owned=owned, columns=columns, pieces=pieces)
    torch.testing.assert_close(logits, sliced, rtol=tolerance, atol=tolerance)
    assert logits.dtype == dtype and not logits[:, pieces:].any()
    assert (logits.float().sum(-1)[owned].abs() < 20 * tolerance).all()  # p − 1[v = y] sums to 0
