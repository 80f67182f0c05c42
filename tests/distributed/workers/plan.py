"""Rank functions of test_plan.py.

Build real engines and models, and measure what `plan` computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.engine.freeze import audit_rank
from megatron_patches.model.penalty import take_auxiliary_losses
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.groups import (
    ParallelContext,
    initialize_distributed,
    set_seeds,
    shutdown_distributed,
)
from pretrain.ranks.release import release_engine
from pretrain.training.engine import wrap_model

BOUNDARY = 1


def audits(payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """For each configuration, every rank's audit of the engine that the program builds for it."""
    return [_audit(load_config("demo", overrides)) for overrides in payload["configs"]]


def _audit(config: Config) -> list[dict[str, Any]]:
    context, model = _model(config)
    engine, _, _ = wrap_model(model, resolve(config, context.world_size), context)
    audit = audit_rank(engine) | {"tensor_parallel_rank": context.tensor_parallel_rank}
    release_engine(engine)
    del engine, model
    return _of_all_ranks(audit, context)


def kept_for_backward(payload: dict[str, Any]) -> list[list[int]]:
    """For each configuration, every rank's bytes that autograd keeps from forward to backward."""
    return [_kept(load_config("demo", overrides)) for overrides in payload["configs"]]


def _kept(config: Config) -> list[int]:
    """Storages that saved-tensor hooks see, each once, without weights and frozen bank."""
    context, model = _model(config)
    weight_storages = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weight_storages:
            kept[tensor.untyped_storage().data_ptr()] = (
                tensor  # held, so that no other gets its address
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, config)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    kept.clear()
    del model, loss
    return _of_all_ranks(size, context)


def peaks(payload: dict[str, Any]) -> list[list[int]]:
    """For each configuration, every rank's most bytes at once in a forward and backward pass."""
    return [_peak(load_config("demo", overrides)) for overrides in payload["configs"]]


def _peak(config: Config) -> list[int]:
    """Beyond the weights, and beyond the gradients that an earlier pass has left."""
    context, model = _model(config)
    _loss(model, config).backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        _loss(model, config).backward()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    del model
    return _of_all_ranks(most, context)


def _model(config: Config) -> tuple[ParallelContext, torch.nn.Module]:
    """Build the model in the phase of the plan, the one in which most weights train."""
    size = config.parallel.tensor_model_parallel_size
    context = initialize_distributed(LaunchEnvironment.read(), size, timeout_seconds=60)
    set_seeds(config.run.seed, 1, 0, context.tensor_parallel_rank)
    return context, build_model(config, context, config.fullest_phase)


def _loss(model: torch.nn.Module, config: Config) -> torch.Tensor:
    size = (config.data.micro_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(
        0, config.model.vocab_size, size, generator=torch.Generator().manual_seed(0)
    )
    losses = token_losses(model, tokens, BOUNDARY if config.data.reset_at_document_end else None)
    return sum(take_auxiliary_losses(model).values(), losses.sum())


def _of_all_ranks(value: Any, context: ParallelContext) -> list[Any]:
    ranks: list[Any] = [None] * context.world_size
    dist.all_gather_object(ranks, value)
    shutdown_distributed(context)
    return ranks
