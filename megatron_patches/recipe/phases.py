"""Schedule that makes frozen Query/Key layers trainable in the course of a run, phase by phase.

    phase 0        steps 1 … s_1          every layer frozen, learning rate × 1
    phase i        steps s_i + 1 … s_i+1  also the layers of entry i trainable, learning rate × factor_i

with s_i = the part `at` of the run's steps, rounded. A layer that has become trainable stays so, and starts
from its frozen rows. The factor multiplies the whole learning-rate schedule, in place of the factor before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patches.errors import MethodError
from megatron_patches.recipe.layers import layer_range


@dataclass(frozen=True)
class Unfreeze:
    """Entry of the schedule: the beginning of a phase.

    Attributes:
        at: part of the run's steps after which the phase begins, between 0 and 1.
        layers: the layers that become trainable, in the notation of `layers`; layers that already are may
            be named again.
        learning_rate_factor: factor of the learning-rate schedule from there on, in place of the one before.
    """

    at: float
    layers: str
    learning_rate_factor: float = 1.0


def phases_of_layers(schedule: Sequence[Unfreeze], num_layers: int) -> list[int | None]:
    """Return for each layer the phase (from 1) in which the layer becomes trainable; None: never."""
    phases: list[int | None] = [None] * num_layers
    for phase, entry in enumerate(schedule, start=1):
        for layer in _layers(entry, num_layers):
            if phases[layer] is None:
                phases[layer] = phase
    return phases


def newly_trainable(schedule: Sequence[Unfreeze], phase: int, num_layers: int) -> list[int]:
    """Return the layers that become trainable at the beginning of a phase."""
    return [layer for layer, begin in enumerate(phases_of_layers(schedule, num_layers)) if begin == phase]


def last_steps(schedule: Sequence[Unfreeze], total_steps: int) -> list[int]:
    """Return s_1, s_2 …: the last step of each phase except the last phase. Steps count from 1."""
    return [round(entry.at * total_steps) for entry in schedule]


def check_unfreeze(schedule: Sequence[Unfreeze], num_layers: int, total_steps: int) -> None:
    """Raise MethodError for a schedule with an entry that changes nothing, or at no step of the run."""
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
