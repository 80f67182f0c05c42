"""Parallel linear layers of megatron-core, in a form that a compiler can trace too.

In eager mode they run megatron-core's own code. Its functions look up process groups, warn, and
wait for running collectives, each of which breaks a graph in two. In a compiled graph these layers
compute the same with the same collectives by `products` and `collectives`.

Version-sensitive: subclasses of megatron-core's ColumnParallelLinear and RowParallelLinear without
bias.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers

from megatron_patches.attention.products import column_parallel_products
from megatron_patches.engine.collectives import (
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """Linear layer whose output rows are sharded."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply `[seq(/tp), batch, hidden]` -> `[seq, batch, rows of this rank]`, and no bias.

        Args:
            input_: `[seq(/tp), batch, hidden]`.
            weight: `[rows of this rank, hidden]`; None: the layer's own.
            runtime_gather_output: argument of megatron-core; must not be set.
        """
        if not torch.compiler.is_compiling():
            return super().forward(input_, weight, runtime_gather_output)
        assert self.bias is None and not runtime_gather_output
        weight = self.weight if weight is None else weight
        (output,) = column_parallel_products(
            input_,
            None,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            weights=[weight],
        )
        return output, None


class RowParallelLinear(layers.RowParallelLinear):
    """Linear layer whose input columns are sharded."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply `[seq, batch, columns of this rank]` -> `[seq(/tp), batch, hidden]`; no bias."""
        if not torch.compiler.is_compiling():
            return super().forward(input_)
        assert self.bias is None
        output = torch.nn.functional.linear(input_, self.weight)
        if self.tp_group.size() > 1:
            output = _SumOverRanks.apply(output, self.tp_group, self.sequence_parallel)
        return output, None


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks: whole, or under sequence parallelism this rank's slice of it."""

    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, tp_group: dist.ProcessGroup, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.tp_group, ctx.sequence_parallel = tp_group, sequence_parallel
        start = start_reduce_scatter if sequence_parallel else start_all_reduce
        return finish(*start(partial, tp_group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        if ctx.sequence_parallel:
            grad = finish(*start_all_gather(grad.contiguous(), ctx.tp_group))
        return grad, None, None
