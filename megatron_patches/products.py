"""Products of one input with several column-parallel weights, some of them frozen, in one autograd function.

So they need the collectives of one product: without sequence parallelism an all-reduce of the input gradient;
with it an all-gather forward, and an all-gather and a reduce-scatter backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.collectives import finish, finish_input_grad, start_all_gather, start_input_grad


def column_parallel_products(
    hidden_states: torch.Tensor,
    frozen_weight: torch.Tensor | None,
    tp_group: dist.ProcessGroup,
    sequence_parallel: bool,
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The input `[seq(/tp), batch, hidden]` times every weight `[rows of this rank, hidden]`.

    Returns:
        `[seq, batch, rows]` each; that of the frozen weight, if there is one, comes first.
    """
    if torch.is_grad_enabled():
        products: tuple[torch.Tensor, ...] = _ColumnParallelProducts.apply(
            hidden_states, frozen_weight, tp_group, sequence_parallel, *weights
        )
        return products
    # Without gradients dynamo (torch 2.13) calls an autograd function with two `weights` without its context.
    return _products(hidden_states, frozen_weight, tp_group, sequence_parallel, weights)


def _products(
    hidden_states: torch.Tensor,
    frozen_weight: torch.Tensor | None,
    tp_group: dist.ProcessGroup,
    sequence_parallel: bool,
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    if sequence_parallel:
        hidden_states = finish(*start_all_gather(hidden_states, tp_group))
    every = weights if frozen_weight is None else (frozen_weight, *weights)
    return tuple(hidden_states @ weight.t() for weight in every)


class _ColumnParallelProducts(torch.autograd.Function):
    """(x, W_f, W_1 … W_n) -> (x W_fᵀ, x W_1ᵀ … x W_nᵀ), with gradients for x and each W_i, but not W_f."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        frozen_weight: torch.Tensor | None,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # The local slice is kept for backward, not the gathered sequence: the memory sequence parallelism
        # exists to save.
        ctx.save_for_backward(hidden_states, frozen_weight, *weights)
        ctx.tp_group = tp_group
        ctx.sequence_parallel = sequence_parallel
        return _products(hidden_states, frozen_weight, tp_group, sequence_parallel, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_states, frozen_weight, *weights = ctx.saved_tensors
        every = weights if frozen_weight is None else [frozen_weight, *weights]
        # Each collective overlaps a product that does not depend on it: the gather overlaps the input
        # gradient, and the reduction of the input gradient overlaps the weight gradients.
        gather = None
        if ctx.sequence_parallel:
            hidden_states, gather = start_all_gather(hidden_states, ctx.tp_group)
        flat = grads[0].flatten(0, 1) @ every[0]
        for grad, weight in zip(grads[1:], every[1:], strict=True):
            flat = torch.addmm(flat, grad.flatten(0, 1), weight)
        input_grad = flat.view(*grads[0].shape[:-1], flat.size(-1))
        if ctx.sequence_parallel:
            hidden_states = finish(hidden_states, gather)
        input_grad, reduction = start_input_grad(input_grad, ctx.tp_group, ctx.sequence_parallel)
        inputs = hidden_states.flatten(0, 1)
        learned = grads[len(every) - len(weights) :]
        weight_grads = [grad.flatten(0, 1).t() @ inputs for grad in learned]
        input_grad = finish_input_grad(input_grad, reduction, ctx.tp_group)
        return input_grad, None, None, None, *weight_grads
