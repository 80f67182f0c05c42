"""The short convolution: its values and gradients, within one document."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.attention.convolution import convolve, reach_of
from megatron_patches.engine.documents import Documents

BATCH, HEADS, HEAD_DIM = 2, 3, 4


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain(inputs: torch.Tensor, taps: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The formula, token by token; starts `[batch, seq]`."""
    by_tap = taps.view(HEADS, HEAD_DIM, -1)
    rows = []
    for step in range(len(inputs)):
        samples = []
        for sample in range(inputs.size(1)):
            seen = range(int(starts[sample, step]), step + 1)
            terms = [
                inputs[t, sample] * by_tap[..., step - t] for t in seen if step - t < taps.size(1)
            ]
            samples.append(torch.stack(terms).sum(0))
        rows.append(torch.stack(samples))
    return torch.stack(rows)


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("form", ["sample", "documents", "mask"])
# In fp32 whole samples go by oneDNN.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_the_formula(
    length: int, taps: int, form: str, dtype: torch.dtype
) -> None:
    starts = torch.zeros(BATCH, length, dtype=torch.long)
    if form != "sample":
        starts[0, 3:], starts[1, 1:], starts[1, 5:] = 3, 1, 5
    documents = Documents(starts)
    visible = {"sample": None, "documents": documents, "mask": documents.mask()}[form]
    inputs = drawn(length, BATCH, HEADS, HEAD_DIM, dtype=dtype).requires_grad_()
    weights = drawn(HEADS * HEAD_DIM, taps, seed=1, dtype=dtype).requires_grad_()
    gradient = drawn(length, BATCH, HEADS, HEAD_DIM, seed=2, dtype=dtype)
    convolved = convolve(inputs, weights, reach_of(visible, taps))
    expected = plain(inputs, weights, starts)
    torch.testing.assert_close(convolved, expected)
    for mine, theirs in zip(
        torch.autograd.grad(convolved, (inputs, weights), gradient),
        torch.autograd.grad(expected, (inputs, weights), gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
