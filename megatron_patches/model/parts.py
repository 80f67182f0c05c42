"""Modules of the parts that `megatron_patches.recipe.parts` declares, by their names there.

Version-sensitive: has the constructor that megatron-core gives to a norm, and the settings of its
MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class MlpSettings(NamedTuple):
    """Settings of megatron-core's MLP of two linear layers.

    Attributes:
        activation: between the layers.
        gated: the first layer also makes a factor of what the activation gives, as wide as that.
    """

    activation: Callable[[torch.Tensor], torch.Tensor]
    gated: bool = False

    def options(self) -> dict[str, Any]:
        """Return the arguments of megatron-core's TransformerConfig."""
        return {"activation_func": self.activation, "gated_linear_unit": self.gated}


NORMS: Mapping[str, type[torch.nn.Module]] = {"layer_norm": LayerNorm}
MLPS: Mapping[str, MlpSettings] = {"gelu": MlpSettings(torch.nn.functional.gelu)}
