"""Rank functions of test_audit.py.

Look into live engines, and corrupt some.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from megatron_patches.bank.shards import digest
from megatron_patches.engine.freeze import FROZEN_BUFFERS, audit_rank, frozen_layers, frozen_weights
from megatron_patches.errors import MethodError
from megatron_patches.recipe.counting import count_parameters
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.signals import StopSignals
from pretrain.runs.position import Position
from pretrain.training.engine import wrap_model
from pretrain.training.loop import train_step
from pretrain.training.open_run import Run, open_run
from tests.distributed.workers.runs import of_all_ranks, parallel


def all_cases(payload: dict[str, Any]) -> dict[str, Any]:
    """Everything in one launch: {"engines": [...], "corrupted": {...}}."""
    return {
        "engines": [_engine(load_config("demo", overrides)) for overrides in payload["engines"]],
        "corrupted": {
            name: _corrupted(load_config("demo", overrides), name.startswith("trainable"))
            for name, overrides in payload["corrupted"].items()
        },
    }


def _engine(config: Config) -> dict[str, Any]:
    """Return an engine's audit before and after a few steps, losses, and values to compare with."""
    with open_run(config) as run:
        initial = audit_rank(run.engine)
        bank = _bank(run.engine.module)
        losses = [
            train_step(run, _position(config, step), StopSignals())[0].loss
            for step in range(config.total_steps)
        ]
        facts = {
            "before": initial,
            "after": audit_rank(run.engine),
            "bank_unchanged": _bank(run.engine.module) == bank,
            "banks": len(bank),
            "gradients_between_micro_batches": _gradients_between_micro_batches(
                run, config.total_steps
            ),
            "tensor_parallel_rank": run.context.tensor_parallel_rank,
        }
        ranks = of_all_ranks(facts)
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


def _corrupted(config: Config, requires_grad: bool) -> str:
    """The audit's complaint about a model that was spoiled before DeepSpeed saw it.

    "" if it has none.
    """
    with parallel(config.parallel.tensor_model_parallel_size) as context:
        model = build_model(config, context)
        _make_bank_parameters(model, requires_grad)
        try:
            wrap_model(model, resolve(config, context.world_size), context)
            complaint = ""
        except MethodError as error:
            complaint = str(error)
        complaints = of_all_ranks(complaint)
    assert len(set(complaints)) == 1, complaints
    return complaint


def _make_bank_parameters(model: torch.nn.Module, requires_grad: bool) -> None:
    """Make the bank parameters, which the product must never do.

    With a gradient they also enter the optimizer's groups.
    """
    for _, layer in frozen_layers(model):
        assert isinstance(layer, torch.nn.Module)
        for name in FROZEN_BUFFERS:
            if layer._buffers[name] is not None:
                bank = layer._buffers.pop(name)
                layer.register_parameter(name, torch.nn.Parameter(bank, requires_grad))
