"""Model -> DeepSpeed engine, and the audit of its contents.

Version-sensitive: at ZeRO stage 0 in fp32 DeepSpeed 0.19 clips but keeps no norm, so our optimizer
does both. At stage 1 in bf16 with fp32 accumulation (`BF16_Optimizer`) DeepSpeed keeps the norm,
and our optimizer clips by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from megatron_patches.engine.freeze import audit, parameter_groups, reduce_partial_gradients
from megatron_patches.model.gpt import GPT
from megatron_patches.recipe.optimizers import ADAMW, rule_of
from pretrain.config.deepspeed import check_sections
from pretrain.config.optimizer import OptimizerSection
from pretrain.config.resolved import Resolved
from pretrain.optimizer.muon import MuonWithAdamW
from pretrain.optimizer.optimizers import (
    FusedAdamW,
    RuleOptimizer,
    clip_by_outer_norm,
    clip_by_own_norm,
)
from pretrain.optimizer.reduction import OverlappedReduction, reduces_whole_gradients
from pretrain.ranks.groups import ParallelContext, import_deepspeed

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimizerSection], RuleOptimizer]] = {
    ADAMW.name: FusedAdamW,
    MuonWithAdamW.rule.name: MuonWithAdamW,
}
"""{name of the first rule: what builds the optimizer of parameter groups and settings}."""


def build_optimizer(model: GPT, settings: OptimizerSection) -> RuleOptimizer:
    """Build the optimizer of a model's trainable parameters, for DeepSpeed.

    Args:
        model: a model from `build_model`, before DeepSpeed wraps it.
    """
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    declared = {tensor.name: tensor for tensor in model.inventory}
    for name, parameter in model.named_parameters():
        rule = rule_of(declared[name], settings.rules)
        parameter.optimizer_rule = rule.name  # type: ignore[attr-defined]
    groups = parameter_groups(
        model,
        settings.weight_decay,
        rate_factors={name: settings.rate_factor(tensor) for name, tensor in declared.items()},
        decay_factors=settings.weight_decay_factors,
    )
    optimizer = OPTIMIZERS[settings.rules[0].name](groups, settings)
    if type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))
    return optimizer


def wrap_model(
    model: GPT, resolved: Resolved, context: ParallelContext
) -> tuple[Any, OverlappedReduction | None, dict[str, Any]]:
    """Wrap a model of `build_model` in optimizer and DeepSpeed engine, and audit the engine.

    Args:
        model: a model whose parameters train; frozen weights are buffers.
        resolved: the configuration, its layout and DeepSpeed's settings.
        context: process groups and device.

    Returns:
        The deepspeed.DeepSpeedEngine; the reduction of its gradients if DeepSpeed does not do it;
        the audit.

    Raises:
        MethodError: ZeRO holds a frozen weight, or Muon would not reach every matrix.
    """
    config, stage = resolved.config, resolved.layout.zero_stage
    settings = deepcopy(dict(resolved.deepspeed))  # DeepSpeed may keep and change it
    precision = config.precision
    check_sections(settings, context.mpu)
    bf16_optimizer = (
        precision.dtype == "bf16" and precision.grad_accum_dtype == "fp32" and stage == 1
    )
    own_optimizer = precision.dtype == "fp32" and stage == 0
    clip = config.optimizer.gradient_clip
    optimizer = build_optimizer(model, config.optimizer)
    reduce_partial_gradients(model, context.tensor_parallel_group)
    if own_optimizer or bf16_optimizer:
        settings["gradient_clipping"] = 0.0
    if own_optimizer:
        clip_by_own_norm(optimizer, clip, context.tensor_parallel_group)
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
    engine_audit = audit(engine, context.tensor_parallel_group)
    rules = optimizer.prepare(engine, model.inventory, context, replicated=stage == 0)
    if rules is not None:
        engine_audit["rules"] = rules
    return engine, reduction, engine_audit


def set_learning_rate(
    engine: Any, learning_rate: float, before_freezing: Mapping[int, float]
) -> None:
    """Set the learning rate of every parameter group, times the group's factors.

    The loop owns the schedule, a function of the step.

    Args:
        engine: a deepspeed.DeepSpeedEngine.
        learning_rate: rate of this step.
        before_freezing: {phase: factor of the groups that it freezes}.
    """
    for group in engine.optimizer.param_groups:
        factor = before_freezing.get(group["until"], 1.0)
        group["lr"] = learning_rate * group["rate_factor"] * factor
