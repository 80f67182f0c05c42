"""Parameter groups for DeepSpeed, and the audit of the weights in its live engine.

Groups have trainable weights only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron_patches.engine.zero_state import (
    gradient_size,
    low_precision_parameters,
    numel,
    optimizer_state_size,
    size_of,
    zero_partitions,
)
from megatron_patches.errors import MethodError
from megatron_patches.recipe.optimizers import ADAMW, factor_of_name

FROZEN_BUFFERS = ("query_key_weight", "query_key_right", "query_key_left")
"""Names of the buffers of frozen rows: the rows, then the two factors of a structured bank."""


def parameter_groups(
    model: torch.nn.Module,
    weight_decay: float,
    rate_factors: Mapping[str, float] | None = None,
    decay_factors: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups of the trainable parameters, none of them empty.

    Parameters with the same mark `optimizer_group` form groups of their own: weights that become
    trainable later have a step count of their own, and what comes or goes in the course of the run
    leaves the other groups as they were. The mark `optimizer_rule` keeps apart what different rules
    update. Weight decay is for matrices without the mark `no_weight_decay`. Marks follow from the
    inventory, see `megatron_patches.model.initialize` and `pretrain.optimizer.optimizers`.

    Args:
        weight_decay: weight decay of the parameters that have any.
        rate_factors: {name pattern: factor of the learning rate} for parameters whose name matches.
        decay_factors: {name pattern: factor of the weight decay}, likewise.

    Returns:
        Groups of torch's optimizers; each says its factor of the learning rate under `rate_factor`,
        the name of its rule under `rule`, and the phase that freezes it under `until` (0: none).
    """
    members: dict[tuple[tuple[int, int], str, bool, float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decayed = parameter.ndim >= 2 and not getattr(parameter, "no_weight_decay", False)
            span = getattr(parameter, "optimizer_group", (0, 0))
            rule = getattr(parameter, "optimizer_rule", ADAMW.name)
            rate = factor_of_name(name, rate_factors or {})
            decay = factor_of_name(name, decay_factors or {}) if decayed else 0.0
            members.setdefault((span, rule, not decayed, rate, decay), []).append(parameter)
    return [
        {
            "params": members[key],
            "weight_decay": weight_decay * key[4],
            "rate_factor": key[3],
            "rule": key[1],
            "until": key[0][1],
        }
        for key in sorted(members)  # the same order on every rank and after every resume
    ]


def reduce_partial_gradients(model: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Sum partial gradients of replicated parameters over tensor-parallel ranks.

    Gradients are partial for parameters marked `partial_gradient`: a rank has seen only its slice
    of the sequence, or only its heads. DeepSpeed reduces over data-parallel ranks only. Call before
    `deepspeed.initialize`: tensor hooks run in the order in which they were added.
    """
    if tp_group.size() == 1:
        return

    def all_reduce(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=tp_group)
        return gradient

    # DeepSpeed's own hooks come later, so that they see the sum over tensor-parallel ranks.
    for parameter in model.parameters():
        if getattr(parameter, "partial_gradient", False):
            parameter.register_hook(all_reduce)


@runtime_checkable
class HoldsFrozenWeights(Protocol):
    """Module with weights that do not train: regenerated and never saved, or kept as trained."""

    layer: int

    def frozen_shards(self) -> Iterator[tuple[str, Sequence[int], torch.Tensor]]:
        """Yield (role, global head numbers, this rank's weights `[heads * rows, columns]`)."""
        ...

    def trained_shards(self) -> Iterator[tuple[str, Sequence[int], torch.Tensor]]:
        """Yield the same for rows that train or are frozen as they were trained."""
        ...

    def frozen_tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors in memory of all weights that do not train, or of their factors."""
        ...

    def kept_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return {name: tensor in memory} of the weights that are frozen as they were trained."""
        ...


def frozen_layers(model: torch.nn.Module) -> Iterator[tuple[str, HoldsFrozenWeights]]:
    """Yield (name, module) of every module with frozen weights."""
    for name, module in model.named_modules():
        if isinstance(module, HoldsFrozenWeights):
            yield name, module


def lasting_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of all that no seed can regenerate: parameters and kept rows."""
    yield from model.named_parameters()
    yield from kept_weights(model)


def kept_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the rows that are frozen as they were trained."""
    for name, layer in frozen_layers(model):
        for buffer_name, tensor in layer.kept_tensors().items():
            yield f"{name}.{buffer_name}", tensor


def frozen_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return all tensors of frozen weights in this rank's memory."""
    return [tensor for _, layer in frozen_layers(model) for tensor in layer.frozen_tensors()]


def audit_rank(engine: Any) -> dict[str, Any]:
    """Count what this rank's live DeepSpeed engine holds, after `deepspeed.initialize`.

    Returns:
        `trainable`, `frozen`, `gradients`, `master_weights`, `optimizer_state`: {elements, bytes}
        each; `zero_partitions`: the same for every group of the optimizer; `frozen_in_zero`:
        elements of frozen weights that ZeRO owns, named in `violations`. Where a buffer is only
        allocated by the first step, its entry has `implied` true and the numbers are those that the
        ZeRO stage will allocate. `gradients` is the buffer of accumulation; autograd's own
        gradients exist beside it until they are added.
    """
    trainable = [p for p in engine.module.parameters() if p.requires_grad]
    # Stage 3 leaves each rank a slice of every parameter.
    local_tensors = [getattr(p, "ds_tensor", p) for p in trainable]
    banks = frozen_weights(engine.module)
    partitions = zero_partitions(engine)
    violations = _frozen_in_zero(engine)
    return {
        "trainable": size_of(local_tensors),
        "frozen": size_of(banks),
        "gradients": gradient_size(engine, trainable, partitions),
        "zero_partitions": [size_of([partition]) for partition in partitions],
        "master_weights": size_of([p for p in partitions if not any(p is q for q in trainable)]),
        "optimizer_state": optimizer_state_size(engine, partitions),
        "frozen_in_zero": sum(violations.values()),
        "violations": sorted(violations),
    }


def audit(engine: Any, tp_group: dist.ProcessGroup) -> dict[str, Any]:
    """Gather `audit_rank` from all ranks (collective) and prove that ZeRO holds no frozen weight.

    Raises:
        MethodError: on every rank: names a parameter, if any rank's optimizer holds a frozen
            weight.
    """
    rank_audit = audit_rank(engine)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, rank_audit)
    violations = sorted({name for rank in ranks for name in rank["violations"]})
    if violations:
        raise MethodError(
            f"ZeRO holds the frozen weight '{violations[0]}' ({len(violations)} such); frozen "
            "Query/Key weights must be buffers outside the optimizer, so training was stopped "
            "before step 1"
        )
    parts = {"trainable": "trainable", "frozen": "frozen", "gradient": "gradients"}
    totals = {
        f"{key}_{unit}": sum(rank[part][unit] for rank in ranks)
        for key, part in parts.items()
        for unit in ("elements", "bytes")
    }
    totals["optimizer_state_bytes"] = sum(
        r["optimizer_state"]["bytes"] + r["master_weights"]["bytes"] for r in ranks
    )
    totals |= model_parameter_counts(engine.module, tp_group)
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "frozen_in_zero": 0,
        "totals": totals,
        "ranks": ranks,
    }


def model_parameter_counts(model: torch.nn.Module, tp_group: dist.ProcessGroup) -> dict[str, int]:
    """Count the parameters of the whole model, each once, over ranks with unequal shares."""
    sharded = replicated = 0
    for parameter in model.parameters():
        if parameter.requires_grad and getattr(parameter, "tensor_model_parallel", False):
            sharded += numel(parameter)
        elif parameter.requires_grad:
            replicated += numel(parameter)
    frozen = sum(weight.numel() for weight in frozen_weights(model))
    shares: list[Any] = [None] * tp_group.size()
    dist.all_gather_object(shares, (sharded, frozen), group=tp_group)
    return {
        "model_trainable_parameters": replicated + sum(share[0] for share in shares),
        "model_frozen_parameters": sum(share[1] for share in shares),
    }


def _frozen_in_zero(engine: Any) -> dict[str, int]:
    """Return {name: elements} of frozen weights that an optimizer's group or stage 3 holds."""
    banks = {weight.data_ptr() for weight in frozen_weights(engine.module)}
    banks.discard(0)  # the address of every parameter that stage 3 has emptied
    owned = {id(p) for p in low_precision_parameters(engine)}
    violations = {}
    for name, parameter in engine.module.named_parameters():
        in_zero = id(parameter) in owned or hasattr(parameter, "ds_tensor")
        is_bank = any(buffer in name for buffer in FROZEN_BUFFERS) or parameter.data_ptr() in banks
        is_frozen = is_bank or not parameter.requires_grad
        if in_zero and is_frozen:
            violations[name] = numel(parameter)
    # Stage 3 marks what it has cut with `ds_tensor`; no buffer may carry that mark.
    for name, buffer in engine.module.named_buffers():
        if hasattr(buffer, "ds_tensor"):
            violations[name] = buffer.numel()
    return violations
