"""FLOPs that hardware executes per token: frozen weights left out, recomputation counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron_patches.recipe.block import MLPS
from megatron_patches.recipe.counting import (
    executed_flops_per_token,
    forward_flops_per_token,
    multiplications,
)
from megatron_patches.recipe.parts import ModelShape, Place, Tensor
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.tensors import tensors
from pretrain.config.sections import PerformanceSection

ATTENTION_ONCE = ("none", "query_key")
"""Values of `performance.recompute` with which backward does not attend again."""


@dataclass(frozen=True)
class Products:
    """FLOPs per token of the products with weights, without attention scores.

    Attributes:
        phase: Number of the phase in the policy's schedule, from 0.
    """

    shape: ModelShape
    policy: QKPolicy
    phase: int

    @cached_property
    def forward(self) -> float:
        """Return the FLOPs of a forward pass of the whole model."""
        return forward_flops_per_token(self.shape, self.policy, self.phase, causal_share=0)

    @cached_property
    def frozen(self) -> int:
        """Return the FLOPs of products with frozen rows, or with their factors."""
        inventory = tensors(self.shape, self.policy, self.phase)
        return 2 * multiplications(tensor for tensor in inventory if not tensor.trains)

    @cached_property
    def remade(self) -> int:
        """Return the FLOPs of products with factors in layers with frozen queries and keys only."""
        inventory = tensors(self.shape, self.policy, self.phase)
        layers = layers_of_frozen_rows(inventory)
        return 2 * multiplications(
            tensor for tensor in inventory if "query_key" in tensor.name and tensor.layer in layers
        )

    def again(self, performance: PerformanceSection) -> float:
        """Return the FLOPs that backward repeats.

        Cross entropy `chunked` repeats the logits, recomputation a layer or its attention.
        """
        shape = self.shape
        logits = 2.0 * shape.hidden_size * shape.vocab_size
        weights = MLPS[shape.mlp].tensors(Place("mlp", "mlp"), shape)
        mlp = 2.0 * shape.num_layers * multiplications(weights)
        layers = {
            "none": 0.0,
            "query_key": float(self.remade),
            "attention": self.forward - logits - mlp,
            "full": self.forward - logits,
        }[performance.recompute]
        return layers + (logits if performance.cross_entropy == "chunked" else 0.0)


def layers_of_frozen_rows(inventory: Iterable[Tensor]) -> set[int | None]:
    """Return the layers whose queries and keys come from frozen rows or factors alone."""
    rows = [tensor for tensor in inventory if "query_key" in tensor.name]
    frozen = {tensor.layer for tensor in rows if tensor.kind == "frozen"}
    return frozen - {tensor.layer for tensor in rows if tensor.kind != "frozen"}


def hardware_flops_per_token(
    shape: ModelShape, policy: QKPolicy, phase: int, performance: PerformanceSection
) -> float:
    """Return the FLOPs per token of a training step with recomputation, the basis of `hfu`.

    Args:
        phase: Number of the phase in the policy's schedule, from 0.
    """
    products = Products(shape, policy, phase)
    flops = executed_flops_per_token(shape, policy, phase) + products.again(performance)
    if performance.recompute not in ATTENTION_ONCE:
        flops += forward_flops_per_token(shape, policy, phase) - products.forward  # the scores
    return flops
