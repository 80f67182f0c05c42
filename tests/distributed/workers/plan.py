"""Rank functions of test_plan.py.

Build real engines and models, and measure what `plan` computes.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.engine.freeze import audit_rank
from megatron_patches.model.penalty import take_auxiliary_losses
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.groups import ParallelContext, set_seeds
from pretrain.ranks.release import release_engine
from pretrain.training.engine import wrap_model
from tests.distributed.one_layer import kept_for_backward
from tests.distributed.workers.runs import of_all_ranks, parallel

BOUNDARY = 1


def audits(payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """For each configuration, every rank's audit of the engine that the program builds for it."""
    return [_audit(load_config("demo", overrides)) for overrides in payload["configs"]]


def _audit(config: Config) -> list[dict[str, Any]]:
    with parallel(config.parallel.tensor_model_parallel_size) as context:
        model = _model(config, context)
        engine, _, _ = wrap_model(model, resolve(config, context.world_size), context)
        audit = audit_rank(engine) | {"tensor_parallel_rank": context.tensor_parallel_rank}
        release_engine(engine)
        return of_all_ranks(audit)


def activations(payload: dict[str, Any]) -> list[list[int]]:
    """For each configuration, every rank's bytes that autograd keeps from forward to backward."""
    return [_kept(load_config("demo", overrides)) for overrides in payload["configs"]]


def _kept(config: Config) -> list[int]:
    """Storages that saved-tensor hooks see, each once, without weights and frozen bank."""
    with parallel(config.parallel.tensor_model_parallel_size) as context:
        model = _model(config, context)
        with kept_for_backward(model) as kept:
            _loss(model, config)
        return of_all_ranks(sum(storage.nbytes() for storage in kept.values()))


def peaks(payload: dict[str, Any]) -> list[list[int]]:
    """For each configuration, every rank's most bytes at once in a forward and backward pass."""
    return [_peak(load_config("demo", overrides)) for overrides in payload["configs"]]


def _peak(config: Config) -> list[int]:
    """Beyond the weights, and beyond the gradients that an earlier pass has left."""
    with parallel(config.parallel.tensor_model_parallel_size) as context:
        model = _model(config, context)
        _loss(model, config).backward()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            _loss(model, config).backward()
        held = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return of_all_ranks(most)


def _model(config: Config, context: ParallelContext) -> torch.nn.Module:
    """Build the model in the phase of the plan, the one in which most weights train."""
    set_seeds(config.run.seed, 1, 0, context.tensor_parallel_rank)
    return build_model(config, context, config.fullest_phase)


def _loss(model: torch.nn.Module, config: Config) -> torch.Tensor:
    size = (config.data.micro_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(
        0, config.model.vocab_size, size, generator=torch.Generator().manual_seed(0)
    )
    losses = token_losses(model, tokens, BOUNDARY if config.data.reset_at_document_end else None)
    return sum(take_auxiliary_losses(model).values(), losses.sum())
