"""Rank functions of test_designs.py: train tiny configs one after another in the same processes."""

from __future__ import annotations

import json
from typing import Any

import torch

from megatron_patches.engine.freeze import reduce_partial_gradients
from megatron_patches.model.penalty import take_auxiliary_losses
from megatron_patches.recipe.counting import count_parameters
from pretrain.config.load import load_config
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.groups import ParallelContext, set_seeds
from pretrain.ranks.signals import StopSignals
from pretrain.runs.metrics_file import read_metrics
from pretrain.training.loop import train
from tests.distributed.workers.performance import some_tokens
from tests.distributed.workers.runs import parallel, train_again

DESCENT = 2
"""Steps of gradient descent.

An adapter that starts at 0 hides errors in what is multiplied by it for one.
"""

RATE = 0.3


def train_all(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a report for each run.

    Its curves, its audit, and the parameters that the formulas count. A run with `after` is trained
    again from its checkpoint of that step, into the directory NAME-after-STEP.
    """
    return [_train(**run) for run in payload["runs"]]


def _train(overrides: list[str], after: int | None = None) -> dict[str, Any]:
    config = load_config("demo", overrides)
    train(config, StopSignals())
    if after is not None:
        train_again(overrides, after)
    records = list(read_metrics(config.run_path / "metrics.jsonl"))
    counted = count_parameters(config.shape, config.policy, config.phases[-1].number)
    return {
        "loss": [record["loss/train"] for record in records],
        "gradient_norm": [record["optim/grad_norm"] for record in records],
        "z_loss": [record["loss/z_loss"] for record in records if "loss/z_loss" in record],
        "validation": [record["loss/valid"] for record in records if "loss/valid" in record],
        "audit": json.loads((config.run_path / "audit.json").read_text()),
        "counted": {"trainable": counted.trainable, "frozen": counted.frozen},
    }


def stop_and_continue(payload: dict[str, Any]) -> str:
    """Train a run whose first step ends with a signal to stop, then the same run to its end."""
    config = load_config("demo", payload["overrides"])
    signals = StopSignals()
    signals.stop = True
    assert train(config, signals) == "stopped"
    assert (config.run_path / "state").read_text() == "stopped\n"
    return train(config, StopSignals())


def descents(payload: dict[str, Any]) -> list[list[float]]:
    """Return each config's losses before and after `DESCENT` steps, without an engine."""
    size = load_config("demo", payload["runs"][0]).parallel.tensor_model_parallel_size
    with parallel(size) as context:
        return [_descent(context, overrides) for overrides in payload["runs"]]


def gradients(payload: dict[str, Any]) -> list[dict[str, float]]:
    """Return each config's {trained weight: root mean square of its gradient}.

    The weights are moved from where they start: behind an adapter that starts at 0 nothing counts.
    """
    with parallel() as context:
        return [_gradients(context, overrides) for overrides in payload["runs"]]


def _gradients(context: ParallelContext, overrides: list[str]) -> dict[str, float]:
    config = load_config("demo", overrides)
    model = build_model(config, context)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    loss = token_losses(model, some_tokens(config)).mean()
    sum(take_auxiliary_losses(model).values(), loss).backward()
    return {
        name: 0.0 if weight.grad is None else weight.grad.square().mean().sqrt().item()
        for name, weight in trained.items()
    }


def _descent(context: ParallelContext, overrides: list[str]) -> list[float]:
    config = load_config("demo", overrides)
    model = build_model(config, context)
    reduce_partial_gradients(model, context.tensor_parallel_group)
    set_seeds(config.run.seed, 1, 0, context.tensor_parallel_rank)
    losses = []
    while True:
        loss = token_losses(model, some_tokens(config)).mean()
        penalties = take_auxiliary_losses(model)
        losses.append(loss.item())
        if len(losses) > DESCENT:
            return losses
        sum(penalties.values(), loss).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
