"""A schedule that makes frozen Query/Key layers trainable in the course of a run.

    phase 0        steps 1 … s_1          every layer frozen, learning rate × 1
    phase i        steps s_i + 1 … s_i+1  also the layers of entry i trainable, learning rate × factor_i

with s_i = the part `at` of the run's steps, rounded. A layer that has become trainable stays so, and starts
from the rows it was frozen with. The factor is of the whole learning-rate schedule, in place of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patches.errors import MethodError
from megatron_patches.recipe.layers import layer_range


@dataclass(frozen=True)
class Unfreeze:
    """One entry of the schedule: the beginning of a phase.

    Attributes:
        at: part of the run's steps after which it applies, between 0 and 1.
        layers: which layers become trainable, in the notation of `layers`; those that already are may be
            named again.
        learning_rate_factor: of the learning-rate schedule from there on, in place of the entry before.
    """

    at: float
    layers: str
    learning_rate_factor: float = 1.0


def phases_of_layers(schedule: Sequence[Unfreeze], num_layers: int) -> list[int | None]:
    """For each layer the phase (from 1) in which it becomes trainable; None if it stays frozen.

    Raises:
        MethodError: an entry names no layers of a model of `num_layers` layers.
    """
    phases: list[int | None] = [None] * num_layers
    for phase, entry in enumerate(schedule, start=1):
        for layer in _layers(entry, num_layers):
            if phases[layer] is None:
                phases[layer] = phase
    return phases


def newly_trainable(schedule: Sequence[Unfreeze], phase: int, num_layers: int) -> list[int]:
    """The layers that become trainable at the beginning of a phase."""
    return [layer for layer, begin in enumerate(phases_of_layers(schedule, num_layers)) if begin == phase]


def last_steps(schedule: Sequence[Unfreeze], total_steps: int) -> list[int]:
    """s_1, s_2 …: the last step of each phase but the last one. Steps count from 1."""
    return [round(entry.at * total_steps) for entry in schedule]


def check_unfreeze(schedule: Sequence[Unfreeze], num_layers: int, total_steps: int) -> None:
    """Refuse a schedule of which any entry would change nothing, or at no step of the run.

    Raises:
        MethodError: says which entry, and why.
    """
    steps = last_steps(schedule, total_steps)
    before = 0
    for phase, (entry, step) in enumerate(zip(schedule, steps, strict=True), start=1):
        if not before < step < total_steps:
            raise MethodError(
                f"attention.unfreeze entry {phase} (at: {entry.at}) is after step {step} of {total_steps}; "
                "each entry needs a later step than the one before, inside the run"
            )
        if not newly_trainable(schedule, phase, num_layers):
            raise MethodError(
                f"attention.unfreeze entry {phase} (layers: {entry.layers}) makes no further layer of the "
                f"{num_layers} trainable; name others, or leave it out"
            )
        before = step


def _layers(entry: Unfreeze, num_layers: int) -> range:
    try:
        return layer_range(entry.layers, num_layers)
    except MethodError as error:
        raise MethodError(f"attention.unfreeze: {error}") from None
