"""Model -> DeepSpeed engine, and the audit of its contents.

Version-sensitive: at ZeRO stage 0 in fp32 DeepSpeed 0.19 clips but keeps no norm, so our optimizer
does both. At stage 1 in bf16 with fp32 accumulation (`BF16_Optimizer`) DeepSpeed keeps the norm,
and our optimizer clips by it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from megatron_patches.engine.freeze import audit, reduce_partial_gradients
from pretrain.config.deepspeed import check_zero_section
from pretrain.config.resolved import Resolved
from pretrain.ranks.groups import ParallelContext, import_deepspeed
from pretrain.training.optimizers import build_optimizer, clip_by_outer_norm, clip_by_own_norm
from pretrain.training.reduction import OverlappedReduction, reduces_whole_gradients


def wrap_model(
    model: torch.nn.Module, resolved: Resolved, context: ParallelContext
) -> tuple[Any, OverlappedReduction | None, dict[str, Any]]:
    """Wrap a model of `build_model` in optimizer and DeepSpeed engine, and audit the engine.

    Args:
        model: whose parameters train; frozen weights are buffers.
        resolved: the configuration, its layout and DeepSpeed's settings.
        context: process groups and device.

    Returns:
        The deepspeed.DeepSpeedEngine; the reduction of its gradients if DeepSpeed does not do it;
        the audit.

    Raises:
        MethodError: ZeRO holds a frozen weight.
    """
    reduce_partial_gradients(model, context.tensor_parallel_group)
    config, stage = resolved.config, resolved.layout.zero_stage
    settings = deepcopy(dict(resolved.deepspeed))  # DeepSpeed may keep and change it
    precision = config.precision
    check_zero_section(settings)
    bf16_optimizer = (
        precision.dtype == "bf16" and precision.grad_accum_dtype == "fp32" and stage == 1
    )
    clip = config.optimizer.gradient_clip
    optimizer = build_optimizer(model, config.optimizer)
    if precision.dtype == "fp32" and stage == 0:
        settings["gradient_clipping"] = 0.0
        clip_by_own_norm(optimizer, clip, context.tensor_parallel_group)
    if bf16_optimizer:
        settings["gradient_clipping"] = 0.0
    engine, _, _, _ = import_deepspeed().initialize(
        model=model, optimizer=optimizer, config=settings, mpu=context.mpu, dist_init_required=False
    )
    if bf16_optimizer:
        clip_by_outer_norm(optimizer, engine.optimizer, clip)
    reduction = None
    alone = context.data_parallel_size == 1
    if reduces_whole_gradients(engine) and (alone or config.performance.overlap_reduction):
        engine.enable_backward_allreduce = False
        if not alone:
            reduction = OverlappedReduction(engine, engine.seq_data_parallel_group)
    return engine, reduction, audit(engine, context.tensor_parallel_group)


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    """Set the learning rate of every parameter group, times the group's factor.

    The loop owns the schedule, a function of the step.

    Args:
        engine: a deepspeed.DeepSpeedEngine.
        learning_rate: of this step.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate * group["rate_factor"]
