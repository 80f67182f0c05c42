"""Facts of one layer of attention: collectives, products, whole weights of all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.engine.random_streams import normal_rows
from pretrain.ranks.groups import ParallelContext
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, STD

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


@contextmanager
def kept_for_backward(model: torch.nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """{address: storage} of what autograd keeps meanwhile, without weights and frozen bank."""
    weights = {w.untyped_storage().data_ptr() for w in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no other gets an address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@dataclass(frozen=True)
class LayerRun:
    """Record of a forward and a backward pass of an attention layer.

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


def plain_layer(
    x: torch.Tensor,
    output_grad: torch.Tensor,
    groups: int,
    seed: int,
    probabilities: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return output and gradients of the first layer in plain torch operations on whole weights.

    Args:
        x: `[seq, batch, hidden]`.
        output_grad: `[seq, batch, hidden]`.
        groups: of keys and values.
        seed: of the weights.
        probabilities: of x; `[batch, heads, seq, seq]`.
    """
    x = x.clone().requires_grad_()
    value_weight = initial_rows(seed, "value", groups * HEAD_DIM).requires_grad_()
    std = STD / math.sqrt(2)
    proj = initial_rows(seed, "proj", HIDDEN, columns=HEADS * HEAD_DIM, std=std)
    value = (x @ value_weight.t()).unflatten(-1, (groups, HEAD_DIM))
    value = value.repeat_interleave(HEADS // groups, dim=2)
    mixed = torch.einsum("bhst,tbhd->sbhd", probabilities(x), value).flatten(2)
    output = mixed @ proj.t()
    output.backward(output_grad)
    return {"output": output, "input": x.grad, "value": value_weight.grad}


def initial_rows(
    seed: int, name: str, rows: int, columns: int = HIDDEN, std: float = STD
) -> torch.Tensor:
    """Return a weight of the first layer's attention as it starts, `[rows, columns]` float64."""
    name = f"layer.0.attention.{name}"
    return normal_rows(seed, name, rows=range(rows), columns=columns, std=std).double()


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
    """Worst absolute difference on any rank; infinite for a NaN, which `max` may pass over."""
    worst = (a - b).abs().max().nan_to_num(math.inf, math.inf).detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()
