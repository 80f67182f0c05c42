"""Model -> DeepSpeed engine, and the audit of what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.freeze import audit, parameter_groups, reduce_partial_gradients
from pretrain.config.deepspeed import deepspeed_config
from pretrain.config.tree import Config
from pretrain.ranks.groups import ParallelContext, import_deepspeed


@dataclass(frozen=True)
class WrappedModel:
    """A live engine and what was found in it."""

    engine: Any  # deepspeed.DeepSpeedEngine: its attributes are dynamic, so it cannot be typed usefully
    audit: dict[str, Any]


def wrap_model(model: torch.nn.Module, config: Config, context: ParallelContext) -> WrappedModel:
    """Optimizer and DeepSpeed engine around a model of `build_model`, and the audit.

    Raises:
        MethodError: ZeRO holds a frozen weight.
    """
    reduce_partial_gradients(model, context.tensor_parallel_group)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.optimizer.weight_decay),
        lr=config.optimizer.learning_rate,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    engine, _, _, _ = import_deepspeed().initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_config(config, context.world_size),
        mpu=context.mpu,
        dist_init_required=False,
    )
    return WrappedModel(engine, audit(engine, context.tensor_parallel_group))


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    """The loop owns the schedule: it is a function of the step, so nothing about it needs saving."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
