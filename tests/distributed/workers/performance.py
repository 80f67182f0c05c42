"""Rank functions of test_performance.py.

The same model with one way of computing beside another.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from megatron_patches.engine.freeze import reduce_partial_gradients
from megatron_patches.model.penalty import take_auxiliary_losses
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.model.build import build_model, compile_layers, token_losses
from pretrain.ranks.groups import ParallelContext, set_seeds
from pretrain.training.phase_engine import PhasedEngine
from tests.distributed.one_layer import OperationLog, kept_for_backward
from tests.distributed.workers.runs import parallel

EOD = 2


def compare(payload: dict[str, Any]) -> list[dict[str, float]]:
    """For each case, how far two ways of computing are apart on any rank.

    A case: `overrides`, `ways`, {"one": overrides, "other": overrides}. Differences are in units of
    the largest loss, and of the largest entry of each gradient. `saved` is what autograd keeps for
    backward, in bytes, without weights; `collectives` are those of the forward pass, each with how
    often.
    """
    size = load_config("demo", payload["cases"][0]["overrides"]).parallel.tensor_model_parallel_size
    with parallel(size) as context:
        return [_compare(context, **case) for case in payload["cases"]]


def _compare(
    context: ParallelContext,
    overrides: list[str],
    ways: dict[str, list[str]],
) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    passes = {
        name: _pass(
            context,
            load_config("demo", [*overrides, *changes]),
        )
        for name, changes in ways.items()
    }
    (tensors, facts), (other, other_facts) = passes["one"], passes["other"]
    assert tensors.keys() == other.keys()
    differences = {
        name: _apart(tensors[name], other[name])
        for name in tensors
        if tensors[name].numel()  # adapters of a rank without frozen heads
    }
    worst = torch.tensor([differences.pop("loss"), max(differences.values())])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "loss": worst[0].item(),
        "gradients": worst[1].item(),
        "compared": len(differences),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": len(counters["graph_break"]),
        **{name: {"one": facts[name], "other": other_facts[name]} for name in facts},
    }


def _apart(gradient: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference in units of the largest entry; infinite for a NaN."""
    if torch.equal(gradient, other):
        return 0.0
    relative = (gradient - other).abs().max() / gradient.abs().max()
    return relative.nan_to_num(math.inf, math.inf).item()


def _pass(
    context: ParallelContext, config: Config
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Losses and all gradients of a micro batch.

    Bytes kept for backward, the forward pass's collectives.
    """
    model = build_model(config, context)
    reduce_partial_gradients(model, context.tensor_parallel_group)
    if config.performance.compile == "layers":
        compile_layers(model, "aot_eager")
    set_seeds(config.run.seed, 1, 0, context.tensor_parallel_rank)
    boundary = EOD if config.data.reset_at_document_end else None
    log = OperationLog()
    with (
        kept_for_backward(model) as kept,
        nullcontext() if config.performance.compile == "layers" else log,
    ):
        losses = token_losses(model, some_tokens(config), boundary)
        # Tokens count differently, so that a gradient that forgets how much each counts is noticed.
        weight = torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)
        total = sum(take_auxiliary_losses(model).values(), (losses * weight).mean())
    saved = sum(storage.nbytes() for storage in kept.values())
    total.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": losses.detach(), **gradients}, {
        "saved": saved,
        "collectives": dict(log.collectives),
    }


def some_tokens(config: Config) -> torch.Tensor:
    """`[micro batch, sequence + 1]`, with a document's end here and there."""
    size = (config.data.micro_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(
        3, config.model.vocab_size, size, generator=torch.Generator().manual_seed(7)
    )
    tokens[:, 4::7] = EOD
    tokens[0, 5] = tokens[-1, -2] = (
        EOD  # a document of one token, and one that ends with the sample
    )
    tokens[-1, :20] = 3  # and a longer one
    return tokens


def engine_losses(payload: dict[str, Any]) -> list[list[float]]:
    """Losses and gradient norms of a few steps of the program's engine, config by config."""
    size = load_config("demo", payload["runs"][0]).parallel.tensor_model_parallel_size
    with parallel(size) as context:
        return [_engine_losses(context, load_config("demo", run)) for run in payload["runs"]]


def _engine_losses(context: ParallelContext, config: Config) -> list[float]:
    trainer = PhasedEngine(resolve(config, context.world_size), context)
    numbers = []
    for step in range(3):
        set_seeds(config.run.seed, step, context.data_parallel_rank, context.tensor_parallel_rank)
        loss = token_losses(trainer.engine, some_tokens(config)).mean()
        trainer.engine.backward(loss)
        trainer.engine.step()
        numbers += [loss.item(), float(trainer.engine.get_global_grad_norm() or 0.0)]
    trainer.close()
    return numbers
