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
from megatron_patches.layers import layer_range


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


def phase_of_layer(schedule: Sequence[Unfreeze], layer: int, num_layers: int) -> int | None:
    """The phase (from 1) in which a layer becomes trainable; None if it stays frozen.

    Raises:
        MethodError: an entry names no layers of a model of `num_layers` layers.
    """
    for phase, entry in enumerate(schedule, start=1):
        if layer in _layers(entry, num_layers):
            return phase
    return None


def newly_trainable(schedule: Sequence[Unfreeze], phase: int, num_layers: int) -> list[int]:
    """The layers that become trainable at the beginning of a phase."""
    return [layer for layer in range(num_layers) if phase_of_layer(schedule, layer, num_layers) == phase]


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
