"""The collectives of a column-parallel product, of the attention's input and of the output layer."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_sequence(
    local: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    """Gather `[seq/tp, batch, hidden]` slices along the sequence; valid once the returned work is done."""
    gathered = local.new_empty((local.size(0) * group.size(), *local.shape[1:]))
    return gathered, dist.all_gather_into_tensor(gathered, local.contiguous(), group=group, async_op=async_op)


def reduce_input_grad(
    grad: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    """Start summing the input gradient over the ranks; with `sequence_parallel` each keeps its slice."""
    if group.size() == 1:
        return grad, None
    if not sequence_parallel:
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    local = grad.new_empty((grad.size(0) // group.size(), *grad.shape[1:]))
    return local, dist.reduce_scatter_tensor(local, grad, group=group, async_op=True)
