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
    """FLOPs per token of the products of a training phase.

    Attributes:
        phase: Number of the phase in the policy's schedule, from 0.
    """

    shape: ModelShape
    policy: QKPolicy
    phase: int

    @cached_property
    def forward(self) -> float:
        """Return the FLOPs of a forward pass of the whole model, without attention scores."""
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

    def hardware(self, performance: PerformanceSection) -> float:
        """Return those of a training step with recomputation; `hfu` is made of this.

        Args:
            performance: how the run computes.
        """
        flops = executed_flops_per_token(self.shape, self.policy, self.phase)
        flops += self.again(performance)
        if performance.recompute in ATTENTION_ONCE:
            return flops
        with_scores = forward_flops_per_token(self.shape, self.policy, self.phase)
        return flops + (with_scores - self.forward)


def layers_of_frozen_rows(inventory: Iterable[Tensor]) -> set[int | None]:
    """Return the layers whose queries and keys come from frozen rows or factors alone."""
    rows = [tensor for tensor in inventory if "query_key" in tensor.name]
    frozen = {tensor.layer for tensor in rows if tensor.kind == "frozen"}
    return frozen - {tensor.layer for tensor in rows if tensor.kind != "frozen"}
