"""Refusals of layouts: what a number of ranks or a ZeRO stage cannot do with a configuration.

`resolved` calls both checks. Each message is one sentence that names the keys and their values.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.recipe.optimizers import rule_of
from pretrain.config.tree import Config
from pretrain.errors import UserError


def check_ranks(config: Config, world_size: int) -> None:
    """Refuse what this number of ranks cannot do.

    Raises:
        UserError: too few ranks, or a batch that does not divide.
    """
    size = config.parallel.tensor_model_parallel_size
    if world_size < size:
        raise UserError(
            f"too few ranks: parallel.tensor_model_parallel_size={size} needs at least {size} "
            f"processes, but there {'is' if world_size == 1 else 'are'} {world_size}; start that "
            f"many with torchrun or srun, or here with --local-ranks {size}"
        )
    if world_size % size:
        raise UserError(
            f"{world_size} processes cannot be divided by "
            f"parallel.tensor_model_parallel_size={size}; start a multiple of {size}"
        )
    ranks = world_size // size
    if config.data.global_batch_size % (config.data.micro_batch_size * ranks):
        raise UserError(
            f"data.global_batch_size={config.data.global_batch_size} is not divisible by "
            f"data.micro_batch_size={config.data.micro_batch_size} times {ranks} data-parallel "
            "ranks; change either batch size or the number of processes"
        )


def check_stage(config: Config, stage: int) -> None:
    """Refuse what a ZeRO stage cannot do.

    Args:
        stage: ZeRO stage, 0 to 3.

    Raises:
        UserError: DeepSpeed would fail at this stage, or train something else.
    """
    policy, size = config.policy, config.parallel.tensor_model_parallel_size
    if config.precision.dtype == "bf16" and stage == 0:
        if size > 1:  # under tensor parallelism DeepSpeed takes a rank's norm for the model's
            raise UserError(
                "precision.dtype=bf16 with ZeRO stage 0 would clip by a wrong gradient norm at "
                f"parallel.tensor_model_parallel_size={size}; set deepspeed.config=auto"
            )
        if config.precision.grad_accum_dtype == "fp32":
            raise UserError(
                "precision.grad_accum_dtype=fp32 with precision.dtype=bf16 is not something "
                "DeepSpeed does at ZeRO stage 0; set deepspeed.config=auto"
            )
    if stage > 1 and any(rule.whole_matrices for rule in config.optimizer.rules):
        raise UserError(
            f"optimizer.kind={config.optimizer.kind} needs the gradients of whole matrices, which "
            f"ZeRO stage {stage} does not keep; set deepspeed.config=auto, zero0 or zero1"
        )
    if stage == 3:
        if config.optimizer.qk_clip is not None:
            raise UserError(
                f"optimizer.qk_clip={config.optimizer.qk_clip:g} needs whole weights on every "
                "rank, which ZeRO stage 3 does not keep; set deepspeed.config=auto or zero2"
            )
        _check_same_parameters(config)
    if policy.phases and stage not in (1, 2):
        raise UserError(
            "attention.phases changes in the middle of the run what is trained, which is not "
            f"possible here under ZeRO stage {stage}; set deepspeed.config=auto, zero1 or zero2"
        )
    if stage in (1, 2) and size > 1:
        _check_same_groups(config)
    if config.performance.compile == "layers" and stage == 3:
        raise UserError(
            "performance.compile=layers is not possible under ZeRO stage 3, whose hooks fetch "
            "the weights of each module in Python; set performance.compile=none or "
            "deepspeed.config=zero2"
        )


def _check_same_groups(config: Config) -> None:
    """Refuse a parameter group of some heads that only some tensor-parallel ranks have.

    Weights form a group if they change together in the course of the run, or share a rate and a
    decay. DeepSpeed sums its gradient norm over the ranks group by group, and ranks with other
    groups would wait for each other.
    """
    size = config.parallel.tensor_model_parallel_size
    for phase, inventory in enumerate(config.inventories):
        groups: list[dict[tuple[Any, ...], str]] = [{} for _ in range(size)]
        for tensor in (tensor for tensor in inventory if tensor.trains):
            rule = rule_of(tensor, config.optimizer.rules).name
            rate = config.optimizer.rate_factor(tensor)
            # A matrix whose factor is 0 is not in the group of the vectors, which never decay.
            decay = config.optimizer.decay_factor(tensor) if tensor.decays else None
            group = (tensor.span, rule, rate, decay)
            for rank, rank_groups in enumerate(groups):
                if tensor.rank_elements(rank, size):
                    rank_groups.setdefault(group, tensor.name)
        names = {group: name for rank_groups in groups for group, name in rank_groups.items()}
        for group, name in names.items():
            lacking = [rank for rank, rank_groups in enumerate(groups) if group not in rank_groups]
            if not lacking:
                continue
            if group[0] not in {span for span, *_ in groups[lacking[0]]}:
                raise UserError(
                    f"attention.phases: in phase {phase} some of the {size} tensor-parallel ranks "
                    "have none of the heads that are frozen or trained together; choose another "
                    "parallel.tensor_model_parallel_size, or more heads"
                )
            raise UserError(
                f"{name} has a learning rate or weight decay of its own, and tensor-parallel rank "
                f"{lacking[0]} of {size} has no weight with that; leave its factor out, or choose "
                "another parallel.tensor_model_parallel_size"
            )


def _check_same_parameters(config: Config) -> None:
    """Refuse ZeRO-3 where a rank lacks parameters that others have: trained heads, or adapters."""
    size, groups = config.parallel.tensor_model_parallel_size, config.num_query_groups
    policy = config.policy
    for layer, frozen in enumerate(policy.frozen_groups(config.model.num_layers, groups)):
        parts = {
            "trained": set(range(groups)) - {*frozen},
            "frozen": {*frozen} if policy.adapters else set(),
        }
        for kind, heads in parts.items():
            ranks = len({group // (groups // size) for group in heads})
            if 0 < ranks < size:
                raise UserError(
                    f"ZeRO-3 cannot train where a tensor-parallel rank has no {kind} head and "
                    f"another has: layer {layer} has some on {ranks} of {size} ranks; choose "
                    "ZeRO-2, another parallel.tensor_model_parallel_size or other "
                    "attention.frozen_heads"
                )
