"""Transfer of the training state from one DeepSpeed engine into one that trains other weights.

Parameter groups that both engines have hold the same parameters in the same order, so they are cut
alike: each rank copies its own slices, without arithmetic or communication, and every bit survives.
Parameters that only the new engine trains keep their start values. Of parameters that the new
engine no longer trains, only the weights move, in the precision of the model.
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
        start, length: Range in this rank's flattened parameter, in elements.
        values: {kind: elements}: the master weights and each state of the optimizer.
        step: Count of the states' updates; None for an optimizer that does not count them.
    """

    start: int
    length: int
    values: dict[str, torch.Tensor]
    step: torch.Tensor | None

    @classmethod
    def of(cls, live: Slice) -> SliceState:
        """Copy a live slice."""
        values = {kind: _host_copy(live.values(kind)) for kind in live.kinds}
        step = None if live.step is None else _host_copy(live.step)
        return cls(live.start, live.length, values, step)

    def give(self, live: Slice) -> None:
        """Overwrite the same slice of another engine."""
        for kind, values in self.values.items():
            live.values(kind).copy_(values)
        if live.step is not None and self.step is not None:
            live.step.copy_(self.step)


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
        weights = {name: _host_copy(weight) for name, weight in lasting_weights(engine.module)}
        slices = {live.name: SliceState.of(live) for live in slices_of_rank(engine)}
        return cls(weights, slices, counters_of(engine))

    def give_weights(self, model: torch.nn.Module) -> None:
        """Overwrite the weights that the old model also had; others keep their start values.

        Raises RuntimeError: the new model lacks one of these weights, or its shape differs.
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

        Raises RuntimeError: the engine cuts the parameters in another way than the old one.
        """
        live_slices = {live.name: live for live in slices_of_rank(engine)}
        kept = {name for name, _ in kept_weights(engine.module)}
        for name, state in self.slices.items():
            if name in kept:  # frozen in the new phase: it has no master weights and states there
                continue
            live = live_slices.get(name)
            if live is None or (live.start, live.length) != (state.start, state.length):
                raise RuntimeError(
                    f"the engine of the new phase cuts '{name}' in another way than the old one"
                )
            state.give(live)
        set_counters(engine, self.counters)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
