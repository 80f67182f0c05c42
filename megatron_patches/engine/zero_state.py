"""Parameters, gradients and states of a live DeepSpeed optimizer, at any ZeRO stage.

Version-sensitive: reads attributes of DeepSpeed 0.19's ZeRO optimizers.
"""

from __future__ import annotations

from typing import Any

import torch

LOW_PRECISION_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attributes in which the ZeRO-1/2, BF16 and ZeRO-3 optimizers keep parameters by group."""


def low_precision_parameters(engine: Any) -> list[torch.nn.Parameter]:
    """Return the model parameters in the optimizer's own groups, for any ZeRO stage."""
    for attribute in LOW_PRECISION_GROUPS:
        if hasattr(engine.optimizer, attribute):
            return [p for group in getattr(engine.optimizer, attribute) for p in group]
    return [p for group in engine.optimizer.param_groups for p in group["params"]]


def zero_partitions(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that our own optimizer updates.

    Fp32 partitions under ZeRO, else the parameters.
    """
    # Stage 3 steps through sub-groups.
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return [p for group in inner.param_groups for p in group["params"]]


def gradient_size(
    engine: Any, trainable: list[torch.Tensor], partitions: list[torch.Tensor]
) -> dict[str, Any]:
    """Return elements and bytes of the buffer in which gradients are accumulated.

    Args:
        trainable: the parameters that train.
        partitions: the tensors that `zero_partitions` returns.

    Returns:
        {elements, bytes, implied}; `implied`: the first step allocates it.
    """
    optimizer = engine.optimizer
    # BF16 optimizer: ZeRO-1 with fp32 accumulation.
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return size_of(optimizer.fp32_groups_gradients_flat) | {"implied": False}
    if getattr(optimizer, "grad_partitions_flat_buffer", None) is not None:  # stage 3
        return size_of([optimizer.grad_partitions_flat_buffer]) | {"implied": False}
    # Stage 2 keeps this rank's partition, in the accumulation type.
    if engine.zero_optimization_stage() == 2:
        elements = sum(p.numel() for p in partitions)
        return {
            "elements": elements,
            "bytes": elements * optimizer.gradient_accumulation_dtype.itemsize,
            "implied": True,
        }
    return size_of(trainable) | {"implied": True}


def optimizer_state_size(engine: Any, partitions: list[torch.Tensor]) -> dict[str, Any]:
    """Return elements and bytes of the optimizer's states, as `gradient_size` does."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    # Step counters and other scalars are no state of elements.
    states = [
        value
        for state in inner.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.ndim > 0
    ]
    if states:
        return size_of(states) | {"implied": False}
    implied = [partition for partition in partitions for _ in inner.states_of(partition)]
    return size_of(implied) | {"implied": True}


def size_of(tensors: list[Any]) -> dict[str, Any]:
    """Return {elements, bytes} of tensors, of this rank's slices under stage 3."""
    return {
        "elements": sum(numel(tensor) for tensor in tensors),
        "bytes": sum(numel(tensor) * tensor.element_size() for tensor in tensors),
    }


def numel(tensor: Any) -> int:
    """Return the elements of a parameter; stage 3 leaves an empty placeholder in the module."""
    return getattr(tensor, "ds_numel", tensor.numel())
