"""What one layer did and what it holds: collectives, products, whole weights of all ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.ranks.groups import ParallelContext
from tests.megatron_patches.models import HEAD_DIM, HIDDEN

BATCH = 3
GEMMS = ("aten::mm", "aten::addmm", "aten::bmm")


class OperationLog(TorchDispatchMode):
    """Counts collectives (namespace c10d) and keeps the output shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.gemm_shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("c10d::"):
            self.collectives[name.removeprefix("c10d::")] += 1
        if name in GEMMS:
            self.gemm_shapes.append(tuple(result.shape))
        return result


@dataclass(frozen=True)
class LayerRun:
    """One pass of an attention layer, forward and backward.

    Attributes:
        full, full_grad: input and output's gradient, `[length, BATCH, HIDDEN]`.
        rows: this rank's part of their positions.
        hidden: the input of this rank, with its gradient.
        output: of this rank.
        report: collectives, products and names of weights.
    """

    full: torch.Tensor
    full_grad: torch.Tensor
    rows: slice
    hidden: torch.Tensor
    output: torch.Tensor
    report: dict[str, Any]

    def errors(self, reference: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return how far output and the input's gradient are from a reference's."""
        return {
            "output": worst_difference(self.output, reference["output"][self.rows]),
            "input": worst_difference(self.hidden.grad, reference["input"][self.rows]),
        }


def run_layer(
    model: GPTModel,
    context: ParallelContext,
    length: int,
    sequence_parallel: bool,
    mask: torch.Tensor | None = None,
) -> LayerRun:
    """Run the attention of a model's only layer on fixed numbers in float64."""
    attention = model.decoder.layers[0].self_attention
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(length, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    full_grad = torch.randn(length, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    share = length // context.world_size
    start = context.rank * share
    rows = slice(start, start + share) if sequence_parallel else slice(None)
    hidden = full[rows].clone().requires_grad_()
    forward = OperationLog()
    backward = OperationLog()
    with forward:
        output, _ = attention(hidden, attention_mask=mask)
    with backward:
        output.backward(full_grad[rows])
    report = {
        "collectives_forward": dict(forward.collectives),
        "collectives_backward": dict(backward.collectives),
        "gemm_shapes_forward": forward.gemm_shapes,
        "gemm_shapes_backward": backward.gemm_shapes,
        "trainable": sorted(name for name, p in attention.named_parameters() if p.requires_grad),
        "saved": sorted(name for name in attention.state_dict() if "_extra_state" not in name),
    }
    return LayerRun(full, full_grad, rows=rows, hidden=hidden, output=output, report=report)


def full_weights(
    model: GPTModel, context: ParallelContext, groups: int
) -> list[tuple[str, torch.Tensor]]:
    """(name, whole weight) of every parameter; Q, K and V of the fused layout apart."""
    weights = []
    for name, parameter in model.named_parameters():
        full = parameter.detach()
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(full) for _ in range(context.world_size)]
            dist.all_gather(parts, full.contiguous())
            full = torch.cat(parts, dim=parameter.partition_dim)
        if name.endswith("linear_qkv.weight"):
            prefix = name.removesuffix("weight")
            per_group = full.view(groups, -1, HEAD_DIM, HIDDEN)
            weights.append((f"{prefix}value_weight", per_group[:, -1]))
            weights.append((f"{prefix}key", per_group[:, -2]))
            weights.append((f"{prefix}query", per_group[:, :-2]))
        else:
            weights.append((name, full))
    return weights


def worst_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Worst absolute difference on any rank."""
    worst = (a - b).abs().max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()
