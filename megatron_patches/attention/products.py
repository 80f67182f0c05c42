"""Products of one input with several column-parallel weights, in one autograd function.

Some of the weights may be frozen.

Together they need the collectives of one product: without sequence parallelism an all-reduce of the
input gradient; with it an all-gather forward, and an all-gather and a reduce-scatter backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.bank.monarch import Factors, add_input_grad, factor_grads, project
from megatron_patches.engine.collectives import (
    finish,
    finish_input_grad,
    start_all_gather,
    start_input_grad,
)

Frozen = torch.Tensor | Factors | None
"""A frozen weight `[rows of this rank, hidden]`, or its factors; None: no frozen weight."""


def column_parallel_products(
    hidden_states: torch.Tensor,
    frozen: Frozen,
    tp_group: dist.ProcessGroup,
    sequence_parallel: bool,
    weights: Sequence[torch.Tensor],
    factors_train: bool = False,
    kept: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Multiply the input `[seq(/tp), batch, hidden]` by every weight `[rows of this rank, hidden]`.

    Args:
        hidden_states: `[seq(/tp), batch, hidden]`.
        frozen: weight without a gradient, or its factors; None: there is none.
        sequence_parallel: activations outside the products are slices of the sequence.
        weights: further weights `[rows of this rank, hidden]`, those that train before the others.
        factors_train: `frozen` holds factors that train.
        kept: number of the last `weights` that get no gradient.

    Returns:
        `[seq, batch, rows]` each; the product with the frozen weight, if there is one, comes first.
    """
    if torch.is_grad_enabled():
        # Positional, because autograd functions take no keywords.
        frozen_tensors = _frozen_tensors(frozen)
        products: tuple[torch.Tensor, ...] = _ColumnParallelProducts.apply(
            hidden_states,
            tp_group,
            sequence_parallel,
            len(frozen_tensors),
            factors_train,
            len(weights) - kept,
            *frozen_tensors,
            *weights,
        )
        return products
    # Without gradients dynamo (torch 2.13) calls an autograd function with two `weights` without
    # its context.
    return _products(
        hidden_states,
        frozen,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        weights=weights,
    )


def _frozen_tensors(frozen: Frozen) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a frozen weight.

    Autograd must get them one by one; `_frozen_weight` is the inverse.
    """
    if frozen is None:
        return ()
    return frozen if isinstance(frozen, Factors) else (frozen,)


def _frozen_weight(parts: Sequence[torch.Tensor]) -> Frozen:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else Factors(*parts)


def _products(
    hidden_states: torch.Tensor,
    frozen: Frozen,
    tp_group: dist.ProcessGroup,
    sequence_parallel: bool,
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    if sequence_parallel:
        hidden_states = finish(*start_all_gather(hidden_states, tp_group))
    learned = tuple(hidden_states @ weight.t() for weight in weights)
    if frozen is None:
        return learned
    if isinstance(frozen, Factors):
        return project(hidden_states, frozen), *learned
    return hidden_states @ frozen.t(), *learned


class _ColumnParallelProducts(torch.autograd.Function):
    """Products (x W_fᵀ, x W_1ᵀ … x W_nᵀ), with gradients for x and the first W_i, not for W_f.

    W_f is none, one or two of the operands (see `_frozen_tensors`); two may train.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool,
        num_frozen: int,
        factors_train: bool,
        num_trained: int,
        *operands: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # The local slice is kept for backward, not the gathered sequence: the memory sequence
        # parallelism exists to save.
        ctx.save_for_backward(hidden_states, *operands)
        ctx.tp_group = tp_group
        ctx.sequence_parallel = sequence_parallel
        ctx.num_frozen = num_frozen
        ctx.factors_train = factors_train
        ctx.num_trained = num_trained
        frozen = _frozen_weight(operands[:num_frozen])
        weights = operands[num_frozen:]
        return _products(
            hidden_states,
            frozen,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            weights=weights,
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_states, *operands = ctx.saved_tensors
        frozen = _frozen_weight(operands[: ctx.num_frozen])
        weights = operands[ctx.num_frozen :]
        # Each collective overlaps a product that does not depend on it: the gather overlaps the
        # input gradient, and the reduction of the input gradient overlaps the weight gradients.
        gather = None
        if ctx.sequence_parallel:
            hidden_states, gather = start_all_gather(hidden_states, ctx.tp_group)
        input_grad = _input_grad(grads, frozen, weights)
        if ctx.sequence_parallel:
            hidden_states = finish(hidden_states, gather)
        input_grad, reduction = start_input_grad(input_grad, ctx.tp_group, ctx.sequence_parallel)
        inputs = hidden_states.flatten(0, 1)
        # The frozen product, if there is one, comes first, so the weights' gradients are the last.
        learned = grads[len(grads) - len(weights) :]
        trained = learned[: ctx.num_trained]
        weight_grads: list[torch.Tensor | None] = [g.flatten(0, 1).t() @ inputs for g in trained]
        weight_grads += [None] * (len(weights) - len(trained))
        # One None per frozen operand: autograd asks for as many gradients as forward had inputs.
        frozen_grads: Sequence[torch.Tensor | None] = [None] * ctx.num_frozen
        if ctx.factors_train:
            assert isinstance(frozen, Factors)
            frozen_grads = factor_grads(grads[0], inputs, frozen)
        input_grad = finish_input_grad(input_grad, reduction, ctx.tp_group)
        return input_grad, None, None, None, None, None, *frozen_grads, *weight_grads


def _input_grad(
    grads: Sequence[torch.Tensor],
    frozen: Frozen,
    weights: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return Σ grad_i W_i, `[seq, batch, hidden]`, adding each product to those before it."""
    # Factors come last, because `add_input_grad` adds to a sum that exists.
    dense = [*weights] if frozen is None or isinstance(frozen, Factors) else [frozen, *weights]
    first, *other_grads = grads[len(grads) - len(dense) :]
    flat = first.flatten(0, 1) @ dense[0]
    for grad, weight in zip(other_grads, dense[1:], strict=True):
        flat = torch.addmm(flat, grad.flatten(0, 1), weight)
    if isinstance(frozen, Factors):
        flat = add_input_grad(grads[0], frozen, flat)
    return flat.view(*first.shape[:-1], flat.size(-1))
