"""Collectives of parallel products, in an eager form and in one that a compiler can trace.

A collective is started and later finished, so that it overlaps the work in between:

    total, work = start_all_reduce(partial, group)
    ...
    total = finish(total, work)

In a compiled graph a collective is a node (torch's functional collectives), and a group stands as
its name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Work = Any
"""A running collective (`dist.Work`), or None for one that has ended or is a node of a graph."""


def start_all_gather(local: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Work]:
    """Start gathering the ranks' slices along the sequence.

    Args:
        local: this rank's slice, `[seq/tp, batch, hidden]`.
    """
    # A graph can hold no handle of running work, so None stands for it.
    if torch.compiler.is_compiling():
        return _functional.all_gather_into_tensor(local, group.size(), group.group_name), None
    gathered = local.new_empty((local.size(0) * group.size(), *local.shape[1:]))
    return gathered, dist.all_gather_into_tensor(
        gathered, local.contiguous(), group=group, async_op=True
    )


def start_all_reduce(partial: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Work]:
    """Start summing `partial` over the ranks; in eager mode the sum is written into `partial`.

    Args:
        partial: this rank's term, overwritten in eager mode.
    """
    if torch.compiler.is_compiling():
        return _functional.all_reduce(partial, "sum", group.group_name), None
    return partial, dist.all_reduce(partial, group=group, async_op=True)


def start_reduce_scatter(
    partial: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, Work]:
    """Start summing over the ranks into each rank's slice of the sequence.

    Args:
        partial: this rank's term, `[seq, batch, hidden]`.
    """
    if torch.compiler.is_compiling():
        return _functional.reduce_scatter_tensor(
            partial, "sum", group.size(), group.group_name
        ), None
    local = partial.new_empty((partial.size(0) // group.size(), *partial.shape[1:]))
    return local, dist.reduce_scatter_tensor(local, partial, group=group, async_op=True)


def finish(result: torch.Tensor, work: Work) -> torch.Tensor:
    """Wait for the collective and return its `result`.

    Args:
        result: tensor that was started with it.
        work: collective that was started; None once it has ended.
    """
    if torch.compiler.is_compiling():
        waited: torch.Tensor = _functional.wait_tensor(result)
        return waited
    if work is not None:
        work.wait()
    return result


def start_input_grad(
    grad: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[torch.Tensor, Work]:
    """Start summing the gradient of a column-parallel product's input; see `finish_input_grad`.

    Args:
        grad: this rank's term, `[seq, batch, hidden]`.
        sequence_parallel: activations outside the products are slices of the sequence.
    """
    if group.size() == 1:  # nothing to sum, and no other slice of the sequence
        return grad, None
    return start_reduce_scatter(grad, group) if sequence_parallel else start_all_reduce(grad, group)


def finish_input_grad(grad: torch.Tensor, work: Work, group: dist.ProcessGroup) -> torch.Tensor:
    """Wait for the sum over the ranks, or under sequence parallelism for this rank's slice of it.

    Args:
        grad: tensor that `start_input_grad` returned.
        work: collective that was started; None once it has ended.
    """
    return grad if group.size() == 1 else finish(grad, work)


_functional = torch.ops._c10d_functional
