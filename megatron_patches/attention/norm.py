"""LayerNorm whose parameters say that their gradients are partial under sequence parallelism.

Version-sensitive: has the constructor that megatron-core 0.16 calls.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm behind megatron-core's constructor; input and output `[seq, batch, hidden]`.

    megatron-core's own wrapper of the torch norm refuses sequence parallelism. Under sequence parallelism
    every tensor-parallel rank normalises its own slice of the sequence, so each rank's weight gradient is a
    partial sum. `freeze.reduce_partial_gradients` completes it: it looks for the mark `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
