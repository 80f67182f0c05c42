"""Norms and activations that are written by hand: values and gradients against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch.autograd import gradcheck
from torch.nn.functional import rms_norm, silu

from megatron_patches.model.parts import MLPS, NORMS, RMSNorm, _RootMeanSquare, squared_relu, swiglu
from megatron_patches.recipe import block
from megatron_patches.recipe.parts import Place
from pretrain.config.load import load_config

pytestmark = pytest.mark.usefixtures("one_rank")


def drawn(*size: int) -> torch.Tensor:
    values = torch.randn(*size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return values.requires_grad_()


def plain_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up[..., :3], gate_and_up[..., 3:]
    return silu(gate) * up


def built_norm(**eps: float) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=1, hidden_size=6, num_attention_heads=1, params_dtype=torch.float64
    )
    norm = RMSNorm(config, 6, **eps)
    norm.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))
    return norm


def rms(vectors: torch.Tensor) -> torch.Tensor:
    normalised: torch.Tensor = built_norm(eps=1e-2)(vectors)
    return normalised


def plain_rms(vectors: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, vectors.size(-1), dtype=vectors.dtype)
    return rms_norm(vectors, weight.shape, weight, 1e-2)


@pytest.mark.parametrize(
    ("function", "plain"),
    [(swiglu, plain_swiglu), (rms, plain_rms), (squared_relu, lambda x: x.clamp(min=0) ** 2)],
)
@pytest.mark.parametrize("compiling", [False, True])
def test_values_and_gradients(
    function: Callable[[torch.Tensor], torch.Tensor],
    plain: Callable[[torch.Tensor], torch.Tensor],
    compiling: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    # Of three dimensions, of sizes that differ from each other.
    inputs = drawn(2, 5, 6)
    plain_inputs = drawn(2, 5, 6)
    output = function(inputs)
    expected = plain(plain_inputs)
    torch.testing.assert_close(output, expected)
    by_hand = type(output.grad_fn).__name__ in ("_SwiGluBackward", "_RootMeanSquareBackward")
    assert by_hand == (function is not squared_relu and not compiling)
    weights = torch.arange(output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(inputs.grad, plain_inputs.grad)


def test_a_norm_of_small_vectors() -> None:
    norm = built_norm()
    plain = torch.nn.RMSNorm(6, eps=1e-5).double()
    plain.weight = norm.weight
    small = 1e-3 * drawn(2, 5, 6)
    torch.testing.assert_close(norm(small), plain(small))


def test_the_gradient_of_the_norms_weight_and_its_type() -> None:
    def norm(vectors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = _RootMeanSquare.apply(vectors, weight, 1e-5)  # type: ignore[no-untyped-call]
        return normalised

    assert gradcheck(norm, (drawn(2, 3, 4), drawn(4)))
    half = drawn(9, 9, 16).detach().bfloat16().requires_grad_()
    weight = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    output = norm(half, weight)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    summed = rms_norm(half.float(), (16,), eps=1e-5).sum((0, 1))  # rounded once
    assert weight.grad is not None and torch.equal(weight.grad, summed.bfloat16())


def test_every_declared_part_has_its_module() -> None:
    assert set(NORMS) == set(block.NORMS)
    assert set(MLPS) == set(block.MLPS)


def test_which_mlps_are_gated() -> None:
    shape = load_config("demo").shape
    for name, settings in MLPS.items():
        first = next(block.MLPS[name].tensors(Place("mlp", "mlp"), shape))
        assert settings["gated_linear_unit"] == (len(first.parts) == 2), name
