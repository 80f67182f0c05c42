"""Rank functions of test_audit.py.

Look into live engines, corrupt some, and train beside plain torch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.samples import TrainingSamples
from megatron_patches.bank.shards import digest
from megatron_patches.engine.freeze import FROZEN_BUFFERS, audit_rank, frozen_layers, frozen_weights
from megatron_patches.errors import MethodError
from megatron_patches.recipe.counting import count_parameters
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.groups import LaunchEnvironment, initialize_distributed, shutdown_distributed
from pretrain.ranks.signals import StopSignals
from pretrain.runs.position import Position
from pretrain.training.engine import wrap_model
from pretrain.training.loop import train_step
from pretrain.training.open_run import Run, open_run
from tests.distributed.plain_training import plain_optimizer, plain_step
from tests.tiny import with_sections


def all_cases(payload: dict[str, Any]) -> dict[str, Any]:
    """Everything in one launch: {"engines": [...], "corrupted": {...}, "clipping": [...]}."""
    return {
        "engines": [_engine(load_config("demo", overrides)) for overrides in payload["engines"]],
        "corrupted": {
            name: _corrupted(load_config("demo", overrides), CORRUPTIONS[name.split("-")[0]])
            for name, overrides in payload["corrupted"].items()
        },
        "clipping": [
            _clipping(load_config("demo", overrides)) for overrides in payload["clipping"]
        ],
    }


def _engine(config: Config) -> dict[str, Any]:
    """Return an engine's audit before and after a few steps, losses, and values to compare with."""
    with open_run(config) as run:
        before = audit_rank(run.engine)
        bank = _bank(run.engine.module)
        losses = [
            train_step(run, _position(config, step), StopSignals())[0].loss
            for step in range(config.total_steps)
        ]
        own = {
            "before": before,
            "after": audit_rank(run.engine),
            "bank_unchanged": _bank(run.engine.module) == bank,
            "banks": len(bank),
            "gradients_between_micro_batches": _gradients_between_micro_batches(
                run, config.total_steps
            ),
            "tensor_parallel_rank": run.context.tensor_parallel_rank,
        }
        ranks: list[Any] = [None] * run.context.world_size
        dist.all_gather_object(ranks, own)
    counted = count_parameters(config.shape, config.policy)
    return {
        "file": json.loads((config.run_path / "audit.json").read_text()),
        "ranks": ranks,
        "losses": losses,
        "counted": {"trainable": counted.trainable, "frozen": counted.frozen},
    }


def _bank(model: torch.nn.Module) -> list[str]:
    return [digest(weight) for weight in frozen_weights(model)]


def _position(config: Config, step: int) -> Position:
    return Position(step, step * config.data.global_batch_size)


def _gradients_between_micro_batches(run: Run, step: int) -> dict[str, int] | None:
    """Elements and bytes of the gradients that DeepSpeed keeps after one of two micro batches.

    None where it keeps one flat buffer for good, which the audit has measured itself (bf16 at stage
    1, and stage 3).
    """
    run.engine.backward(
        token_losses(
            run.engine, run.batches.at(_position(run.config, step).consumed_samples)[0]
        ).mean()
    )
    stage = run.engine.zero_optimization_stage()
    optimizer = run.engine.optimizer
    if stage == 3 or hasattr(optimizer, "fp32_groups_gradients_flat"):
        return None
    kept = [p.grad for p in run.engine.module.parameters() if p.grad is not None]
    for groups in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        kept += [gradient for group in groups.values() if group is not None for gradient in group]
    return {
        "elements": sum(g.numel() for g in kept),
        "bytes": sum(g.numel() * g.element_size() for g in kept),
    }


def _banks(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """(layer, name, values) of the buffers with frozen rows or factors, taken out of layers."""
    for _, layer in frozen_layers(model):
        assert isinstance(layer, torch.nn.Module)
        for name in FROZEN_BUFFERS:
            if layer._buffers[name] is not None:
                yield layer, name, layer._buffers.pop(name)


def _as_frozen_parameter(model: torch.nn.Module) -> None:
    """Make the bank a parameter without a gradient, which the product must never do."""
    for layer, name, bank in _banks(model):
        layer.register_parameter(name, torch.nn.Parameter(bank, requires_grad=False))


def _as_trainable_parameter(model: torch.nn.Module) -> None:
    """The same with a gradient, so that the bank also enters the optimizer's groups."""
    for layer, name, bank in _banks(model):
        layer.register_parameter(name, torch.nn.Parameter(bank))


CORRUPTIONS: dict[str, Callable[[torch.nn.Module], None]] = {
    "frozen": _as_frozen_parameter,
    "trainable": _as_trainable_parameter,
}


def _corrupted(config: Config, corrupt: Callable[[torch.nn.Module], None]) -> str:
    """The audit's complaint about a model that was spoiled before DeepSpeed saw it.

    "" if it has none.
    """
    launch = LaunchEnvironment.read()
    context = initialize_distributed(launch, config.parallel.tensor_model_parallel_size, 60)
    model = build_model(config, context)
    corrupt(model)
    try:
        wrap_model(model, resolve(config, context.world_size), context)
        complaint = ""
    except MethodError as error:
        complaint = str(error)
    complaints: list[Any] = [None] * launch.world_size
    dist.all_gather_object(complaints, complaint)
    shutdown_distributed(context)
    assert len(set(complaints)) == 1, complaints
    return complaint


def _clipping(config: Config) -> dict[str, Any]:
    """Losses, gradient norms and weights of a parallel run, and plain torch's distance to them."""
    plain = _plain_torch(config)
    losses = []
    norms = []
    worst = torch.zeros(())
    with open_run(config) as run:
        for step in range(config.total_steps):
            result, _ = train_step(run, _position(config, step), StopSignals())
            losses.append(result.loss)
            norms.append(result.gradient_norm)
        for name, parameter in run.engine.module.named_parameters():
            start, end = (_own_part(plain[when][name], parameter, run) for when in ("start", "end"))
            weight = safe_get_full_fp32_param(parameter).view_as(end)
            # The last bit of a weight may fall either way: of a norm's, near 1, it is 2e-4 of these
            # steps.
            beyond_rounding = ((weight - end).abs() - torch.finfo(end.dtype).eps * end.abs()).clamp(
                min=0
            )
            worst = torch.maximum(worst, beyond_rounding.norm() / (end - start).norm())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "losses": losses,
        "norms": norms,
        "plain_losses": plain["losses"],
        "plain_norms": plain["norms"],
        "plain_step_sizes": plain["step_sizes"],
        "worst_update": worst.item(),
    }


def _own_part(full: torch.Tensor, parameter: torch.Tensor, run: Run) -> torch.Tensor:
    """This tensor-parallel rank's part of a full weight."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    return full.chunk(run.context.tensor_parallel_size, parameter.partition_dim)[
        run.context.tensor_parallel_rank
    ]


def _plain_torch(config: Config) -> dict[str, Any]:
    """The same training of the whole model on this rank.

    It has torch's AdamW and clip_grad_norm_, and no DeepSpeed.
    """
    parallel = config.parallel.model_copy(
        update={"tensor_model_parallel_size": 1, "sequence_parallel": False}
    )
    single = with_sections(config, parallel=parallel)
    size = config.data.global_batch_size
    samples = TrainingSamples(
        read_manifest(config.data.directory), config.data.sequence_length, config.data_seed
    )
    context = initialize_distributed(LaunchEnvironment.read(), 1, timeout_seconds=60)
    model = build_model(single, context)
    optimizer = plain_optimizer(model, config)
    weights = [_weights(model)]
    losses, norms = [], []
    for step in range(config.total_steps):
        tokens = torch.from_numpy(samples.blocks(np.arange(step * size, (step + 1) * size)))
        loss = token_losses(model, tokens).mean()
        norm, _ = plain_step(model, optimizer, terms=(loss,), config=config, step=step + 1)
        norms.append(norm)
        losses.append(float(loss))
        weights.append(_weights(model))
    shutdown_distributed(context)
    step_sizes = [_distance(before, after) for before, after in itertools.pairwise(weights)]
    return {
        "losses": losses,
        "norms": norms,
        "start": weights[0],
        "end": weights[-1],
        "step_sizes": step_sizes,
    }


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _distance(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(after[name] - before[name]).norm() for name in before]).norm())
