"""Modules of the parts that `megatron_patches.recipe.block` declares, by their names there.

Version-sensitive: has the constructor that megatron-core gives to a norm, and the settings of its
MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm behind megatron-core's constructor.

    Input and output `[seq, batch, hidden]`.

    megatron-core's own wrapper of the torch norm refuses sequence parallelism. Under sequence
    parallelism every tensor-parallel rank normalises its own slice of the sequence, so each rank's
    weight gradient is a partial sum, as the inventory says of it. `freeze.reduce_partial_gradients`
    completes it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(
            hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype
        )


class RMSNorm(torch.nn.Module):
    """RMS norm of the last dimension, in fp32, behind megatron-core's constructor.

    Input and output `[seq, batch, hidden]`, or of queries or keys `[seq, batch, heads, head_dim]`,
    whose heads then share the weight. Of sequence parallelism see `LayerNorm`.

    Args:
        config: configuration of the model; its params_dtype is the type of the weight.
        hidden_size: size of the last dimension.
        eps: term added to the mean square.

    Attributes:
        weight: parameter `[hidden]`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        weight = torch.empty(hidden_size, device=device, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.eps = eps

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Divide each vector by its root mean square, and multiply it by the weight."""
        if vectors.is_cuda or torch.compiler.is_compiling():
            return torch.nn.functional.rms_norm(vectors, self.weight.shape, self.weight, self.eps)
        normalised: torch.Tensor = _RootMeanSquare.apply(vectors, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normalised


class _RootMeanSquare(torch.autograd.Function):
    """w ∘ x / √(mean x² + ε), which torch computes on the CPU in six passes, and keeps four of."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(vectors.dtype, torch.float32)
        # A norm accumulates in `dtype` without a copy of x in fp32.
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=wide)
        scales = (norms.square() / vectors.size(-1) + eps).rsqrt()
        ctx.save_for_backward(vectors, weight, scales)
        return (vectors * scales).mul_(weight).to(vectors.dtype)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        vectors, weight, scales = ctx.saved_tensors
        grad = grad.to(scales.dtype)
        normalised = vectors * scales
        products = grad * normalised
        # Derivative of the scale: the component of the gradient along the normalised vector.
        along = (products @ weight.to(products.dtype) / vectors.size(-1)).unsqueeze(-1)
        vector_grad = torch.addcmul(grad * weight, normalised, along, value=-1).mul_(scales)
        weight_grad = products.flatten(0, -2).sum(0)
        return vector_grad.to(vectors.dtype), weight_grad.to(weight.dtype), None


def squared_relu(inner: torch.Tensor) -> torch.Tensor:
    """Return ReLU(x)² of `[..., inner]`."""
    return torch.relu(inner).square()


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) ∘ up `[..., inner]` of gate, then up `[..., 2 inner]`."""
    if torch.compiler.is_compiling():
        gate, up = gate_and_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    gated: torch.Tensor = _SwiGlu.apply(gate_and_up)  # type: ignore[no-untyped-call]
    return gated


class _SwiGlu(torch.autograd.Function):
    """SiLU(gate) ∘ up, which keeps its input alone and writes its gradient in one piece."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        # One tensor for both halves, which chunks write in place: no concatenation.
        input_grad = torch.empty_like(gate_and_up)
        gate_grad, up_grad = input_grad.chunk(2, dim=-1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return input_grad


NORMS: Mapping[str, type[torch.nn.Module]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
MLPS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"activation_func": torch.nn.functional.gelu, "gated_linear_unit": False},
    "swiglu": {"activation_func": swiglu, "gated_linear_unit": True},
    "relu2": {"activation_func": squared_relu, "gated_linear_unit": False},
}
"""Settings of megatron-core's MLP of two linear layers: arguments of its TransformerConfig.

Where it is gated, the first layer makes twice the inner width, and the activation halves it.
"""
