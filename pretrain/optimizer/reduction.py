"""Gradients averaged over data-parallel ranks while the backward pass still computes others.

Where its optimizer takes whole gradients, DeepSpeed 0.19 reduces them after the backward pass: at
ZeRO stage 0, and at stage 1 in bf16 with fp32 accumulation (`BF16_Optimizer`, which ignores
`overlap_comm`). It copies all gradients into one buffer, reduces the buffer and copies them back.
Here a gradient is reduced as soon as the last micro batch has added its part. Large gradients and
those in a flat buffer are reduced in place; small ones are packed, since a call costs more than
the copies.

Version-sensitive: the flat buffers are those of DeepSpeed 0.19's `BF16_Optimizer`, whose own hooks
add a bf16 gradient to them (`bf16.immediate_grad_update`) before the hooks of this file run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BUCKET_ELEMENTS = 8 * 2**20
"""Neighbours are reduced together up to this size: 32 MiB, full bandwidth on NVLink."""
PACKED_ELEMENTS = 2**18
"""A gradient smaller than this (1 MiB of fp32) is packed, and packs are four times as large."""


def reduces_whole_gradients(engine: Any) -> bool:
    """Return whether DeepSpeed would average whole gradients after the backward pass.

    False where the user has asked DeepSpeed for another communication type or other factors.
    """
    # DeepSpeed has put no optimizer of its own around ours.
    whole = engine.optimizer is engine.basic_optimizer
    flat = getattr(engine.optimizer, "immediate_grad_update", False)
    plain = engine.postscale_gradients() and engine.gradient_predivide_factor() == 1.0
    return (whole or flat) and plain and engine.communication_data_type == torch.float32


@dataclass
class Bucket:
    """Parameters whose gradients are reduced in one call, and how many gradients are still missing.

    `flat()` returns the buffer in which the gradients lie end to end; None if there is no buffer.
    """

    parameters: Sequence[torch.nn.Parameter]
    flat: Callable[[], torch.Tensor] | None = None
    waiting: int = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = len(self.parameters)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that exist."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class OverlappedReduction:
    """Hooks that average an engine's gradients over the data-parallel ranks.

    All gradients are averaged when `backward` returns. Every rank must run the same backward pass,
    because gradients start their collectives in the order in which they are completed.
    """

    def __init__(self, engine: Any, group: dist.ProcessGroup) -> None:
        self._at_boundary: Callable[[], bool] = engine.is_gradient_accumulation_boundary
        self._group = group
        self._buckets = flat_buckets(engine.optimizer) or packed_buckets(engine.module)
        self._in_flight: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        self._begun = False
        # NCCL takes the mean on the way; gloo cannot.
        self._takes_mean = dist.get_backend(group) == "nccl"
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def detach(self) -> None:
        """Remove the hooks and drop the references to the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()

    def _hook_of(self, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            if not self._at_boundary():
                return
            if not self._begun:
                # autograd calls this after the last gradient; queued once per backward pass.
                self._begun = True
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch(bucket)

        return ready

    def _launch(self, bucket: Bucket) -> None:
        gradients = [bucket.flat()] if bucket.flat else bucket.gradients()
        if not gradients:
            return
        packed = gradients if len(gradients) > 1 else []
        flat = _flatten_dense_tensors(packed) if packed else gradients[0]
        operation = dist.ReduceOp.AVG if self._takes_mean else dist.ReduceOp.SUM
        work = dist.all_reduce(flat, operation, group=self._group, async_op=True)
        assert work is not None
        self._in_flight.append((work, flat, packed))

    def _finish(self) -> None:
        """Reduce incomplete buckets, wait for all reductions, and take the mean."""
        for bucket in self._buckets:
            if bucket.waiting:  # some of its parameters got no gradient in this pass
                self._launch(bucket)
            bucket.waiting = len(bucket.parameters)
        for work, _, _ in self._in_flight:
            work.wait()
        if not self._takes_mean:
            torch._foreach_mul_([flat for _, flat, _ in self._in_flight], 1 / self._group.size())
        for _, flat, packed in self._in_flight:
            if packed:
                torch._foreach_copy_(packed, list(_unflatten_dense_tensors(flat, packed)))
        self._in_flight.clear()
        self._begun = False


def packed_buckets(model: torch.nn.Module) -> list[Bucket]:
    """Group the trainable weights whose gradients are separate tensors: large ones alone.

    The order is from the last layer to the first, as the backward pass completes gradients.
    """
    buckets = []
    pack: list[torch.nn.Parameter] = []
    elements = 0
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        if parameter.numel() >= PACKED_ELEMENTS:
            buckets.append(Bucket([parameter]))
            continue
        pack.append(parameter)
        elements += parameter.numel()
        if elements >= 4 * PACKED_ELEMENTS:
            buckets.append(Bucket(pack))
            pack, elements = [], 0
    return [*buckets, *([Bucket(pack)] if pack else [])]


def flat_buckets(optimizer: Any) -> list[Bucket]:
    """Group neighbours in `BF16_Optimizer`'s flat gradient buffers; empty for other optimizers."""
    if not hasattr(optimizer, "fp32_groups_gradients_flat"):
        return []
    buckets = []
    for parameters, flat in zip(
        optimizer.bf16_groups, optimizer.fp32_groups_gradients_flat, strict=True
    ):
        start = 0
        members: list[torch.nn.Parameter] = []
        for parameter in parameters:
            members.append(parameter)
            elements = sum(member.numel() for member in members)
            if elements >= BUCKET_ELEMENTS or parameter is parameters[-1]:
                buckets.append(Bucket(members, partial(flat.narrow, 0, start, elements)))
                start, members = start + elements, []
    return buckets
