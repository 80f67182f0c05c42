"""Transfer of the training state from one DeepSpeed engine into one that trains other weights.

Groups that both engines have are made of the same parameters in the same order, hence cut alike:
each rank copies its own slices, without arithmetic or communication. So every bit survives the
move. What only the new engine trains keeps its start values; what it no longer trains leaves its
weights, in the precision of the model, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.engine.freeze import kept_weights, lasting_weights
from pretrain.checkpoint.format import Counters
from pretrain.checkpoint.slices import Slice, counters_of, set_counters, slices_of_rank


@dataclass(frozen=True)
class SliceState:
    """This rank's slice of a parameter in host memory.

    Attributes:
        start, length: its elements in this rank's flattened parameter.
        values: the master weights and each state of the optimizer, by kind.
        step: the count of the states' updates; None for an optimizer without one.
    """

    start: int
    length: int
    values: dict[str, torch.Tensor]
    step: torch.Tensor | None

    @classmethod
    def of(cls, own: Slice) -> SliceState:
        """Copy a live slice."""
        values = {kind: _host_copy(own.values(kind)) for kind in own.kinds}
        step = None if own.step is None else _host_copy(own.step)
        return cls(own.start, own.length, values, step)

    def give(self, own: Slice) -> None:
        """Overwrite the slice of another engine."""
        for kind, values in self.values.items():
            own.values(kind).copy_(values)
        if own.step is not None and self.step is not None:
            own.step.copy_(self.step)


@dataclass(frozen=True)
class TrainingState:
    """The trained state of an engine, in host memory; the engine may be destroyed.

    `weights`: this rank's parameters and kept rows by name, in the precision of the model.
    """

    weights: dict[str, torch.Tensor]
    slices: dict[str, SliceState]
    counters: Counters

    @classmethod
    def of(cls, engine: Any) -> TrainingState:
        """Copy the state out of an engine of ZeRO stage 1 or 2."""
        weights = {name: _host_copy(one) for name, one in lasting_weights(engine.module)}
        slices = {own.name: SliceState.of(own) for own in slices_of_rank(engine)}
        return cls(weights, slices, counters_of(engine))

    def give_weights(self, model: torch.nn.Module) -> None:
        """Overwrite the weights that the old model had too; others keep their start values.

        Raises RuntimeError: the new model lacks one of them, or has it in another shape.
        """
        new = dict(lasting_weights(model))
        for name, weight in self.weights.items():
            if name not in new or new[name].shape != weight.shape:
                shape = tuple(weight.shape)
                raise RuntimeError(f"the model of the new phase has no '{name}' of shape {shape}")
            with torch.no_grad():
                new[name].copy_(weight)

    def give_optimizer(self, engine: Any) -> None:
        """Overwrite the masters, moments, step counts and counters of an engine around that model.

        Raises RuntimeError: it cuts the parameters that this state is of in another way.
        """
        live = {own.name: own for own in slices_of_rank(engine)}
        kept = {name for name, _ in kept_weights(engine.module)}
        for name, state in self.slices.items():
            if name in kept:
                continue
            own = live.get(name)
            if own is None or (own.start, own.length) != (state.start, state.length):
                raise RuntimeError(
                    f"the engine of the new phase cuts '{name}' in another way than the old one"
                )
            state.give(own)
        set_counters(engine, self.counters)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
