"""Moving the state of a training from one DeepSpeed engine into another one that trains more.

Version-sensitive: reads and writes the partitions of DeepSpeed 0.19's ZeRO-1/2 and BF16 optimizers. Each
optimizer group is one flat fp32 tensor per data-parallel rank, and the wrapped AdamW keeps its moments and
step count by that tensor. Groups that both engines have are made of the same parameters in the same order,
hence cut alike: each rank copies its own partitions, without arithmetic or communication. So every bit
survives the move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.freeze import LOW_PRECISION_GROUPS

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@dataclass(frozen=True)
class GroupState:
    """One optimizer group on this rank: its parameters' names, fp32 partition, and AdamW's state of it."""

    names: tuple[str, ...]
    master: torch.Tensor
    adam: dict[str, Any]


@dataclass(frozen=True)
class TrainingState:
    """What an engine has learned, in host memory; the engine may be destroyed."""

    weights: dict[str, torch.Tensor]
    groups: tuple[GroupState, ...]
    counters: dict[str, int]

    @classmethod
    def of(cls, engine: Any) -> TrainingState:
        """Copy it out of an engine of ZeRO stage 1 or 2."""
        weights = {name: _host_copy(p) for name, p in engine.module.named_parameters()}
        groups = tuple(
            GroupState(names, _host_copy(flat), {key: _host_copy(value) for key, value in adam.items()})
            for names, flat, adam in _groups(engine)
        )
        return cls(weights, groups, {counter: getattr(engine, counter) for counter in COUNTERS})

    def give_weights(self, model: torch.nn.Module) -> None:
        """Overwrite the parameters that the old model had too; those it had not keep their start values.

        Raises:
            RuntimeError: the new model lacks one of them, or has it in another shape.
        """
        new = dict(model.named_parameters())
        for name, weight in self.weights.items():
            if name not in new or new[name].shape != weight.shape:
                raise RuntimeError(
                    f"the model of the new phase has no '{name}' of shape {tuple(weight.shape)}"
                )
            with torch.no_grad():
                new[name].copy_(weight)

    def give_optimizer(self, engine: Any) -> None:
        """Overwrite the masters, moments, step counts and counters of an engine around that model.

        Raises:
            RuntimeError: its first groups are not the ones this state came from.
        """
        groups = _groups(engine)
        for old, (names, flat, adam) in zip(self.groups, groups, strict=False):
            if names != old.names or flat.shape != old.master.shape:
                raise RuntimeError(
                    "the engine of the new phase does not begin with the groups of the old one"
                )
            flat.data.copy_(old.master)
            for key, value in old.adam.items():
                # A fused AdamW keeps its step count beside its moments, on the device of the partition.
                adam[key] = value.to(flat.device) if torch.is_tensor(value) else value
        if len(groups) <= len(self.groups):
            raise RuntimeError("the engine of the new phase has nothing more to train than the old one")
        for counter, value in self.counters.items():
            setattr(engine, counter, value)


def _groups(engine: Any) -> list[tuple[tuple[str, ...], torch.Tensor, dict[str, Any]]]:
    """(names of the parameters, this rank's fp32 partition, AdamW's state of it) of every group."""
    optimizer = engine.optimizer
    members = next(getattr(optimizer, name) for name in LOW_PRECISION_GROUPS if hasattr(optimizer, name))
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = []
    for parameters, group in zip(members, optimizer.optimizer.param_groups, strict=True):
        (flat,) = group["params"]
        found.append((tuple(name_of[id(p)] for p in parameters), flat, optimizer.optimizer.state[flat]))
    return found


def _host_copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
