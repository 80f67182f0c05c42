"""Norms and activations that are written by hand: values and gradients against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.functional import rms_norm, silu

from megatron_patches.model.parts import MLPS, _RootMeanSquare, squared_relu, swiglu


def drawn(*size: int) -> torch.Tensor:
    made = torch.randn(*size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return made.requires_grad_()


def plain_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up[..., :3], gate_and_up[..., 3:]
    return silu(gate) * up


def rms(vectors: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, vectors.size(-1), dtype=vectors.dtype)
    normalised: torch.Tensor = _RootMeanSquare.apply(vectors, weight, 1e-2)  # type: ignore[no-untyped-call]
    return normalised


def plain_rms(vectors: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, vectors.size(-1), dtype=vectors.dtype)
    return rms_norm(vectors, weight.shape, weight, 1e-2)


@pytest.mark.parametrize(
    ("own", "plain"),
    [(swiglu, plain_swiglu), (rms, plain_rms), (squared_relu, lambda x: x.clamp(min=0) ** 2)],
)
def test_values_and_gradients(
    own: Callable[[torch.Tensor], torch.Tensor], plain: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    # Of three dimensions, of sizes that differ from each other.
    one = drawn(2, 5, 6)
    other = drawn(2, 5, 6)
    found = own(one)
    expected = plain(other)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(found.numel(), dtype=found.dtype).view_as(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_the_gradient_of_the_norms_weight_and_its_type() -> None:
    def norm(vectors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = _RootMeanSquare.apply(vectors, weight, 1e-5)  # type: ignore[no-untyped-call]
        return normalised

    assert gradcheck(norm, (drawn(2, 3, 4), drawn(4)))
    half = drawn(2, 3, 4).detach().bfloat16().requires_grad_()
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    made = norm(half, weight)
    made.float().sum().backward()
    assert made.dtype == torch.bfloat16
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_which_mlps_are_gated() -> None:
    assert [name for name, one in MLPS.items() if one.gated] == ["swiglu"]
    assert MLPS["relu2"].options() == {
        "activation_func": squared_relu,
        "gated_linear_unit": False,
    }
