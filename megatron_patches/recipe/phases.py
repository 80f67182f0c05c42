"""Schedule that makes frozen Query/Key layers trainable in the course of a run, phase by phase.

    phase 0        steps 1 … s_1          every layer frozen, learning rate × 1
    phase i        steps s_i + 1 … s_i+1  layers of entry i trainable too, learning rate × factor_i

with s_i = the part `at` of the run's steps, rounded. A layer that has become trainable stays so,
and starts from its frozen rows. The factor multiplies the whole learning-rate schedule, in place of
the factor before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patches.errors import MethodError

_RANGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(%?)(?:-(\d{1,9}(?:\.\d{1,9})?)(%?))?")


def layer_range(text: str, num_layers: int) -> range:
    """Return the layers that `text` names, counted from 0.

    "4" is one layer, "4-7" four of them (both ends count), "33%-67%" the layers between these parts
    of the depth, each end rounded to a whole number of layers, so that "0%-50%" and "50%-100%"
    share none.

    Args:
        text: the notation.
        num_layers: layers of the model.

    Raises:
        MethodError: the text is no such notation, or the model does not have these layers.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise MethodError(f"'{text}' names no layers; write 4, 4-7 or 50%-100%")
    first, percent, last, last_percent = match.groups()
    if last is not None and percent != last_percent:
        raise MethodError(f"'{text}' mixes layer numbers and percent; write 4-7 or 50%-100%")
    if percent:
        if last is None or not 0 <= float(first) < float(last) <= 100:
            raise MethodError(
                f"'{text}' is not a part of the depth; write two rising percentages, 50%-100%"
            )
        return range(round(num_layers * float(first) / 100), round(num_layers * float(last) / 100))
    if "." in first or "." in (last or ""):
        raise MethodError(f"'{text}' is not a range of whole layer numbers; write 4-7")
    layers = range(int(first), int(last if last is not None else first) + 1)
    if not layers or layers.stop > num_layers:
        raise MethodError(
            f"layers '{text}' do not exist: the model has layers 0 to {num_layers - 1}"
        )
    return layers


def spread(fraction: float, num_groups: int) -> tuple[int, ...]:
    """Choose a fraction of the heads, spread evenly over tensor-parallel ranks.

    Half of four are (1, 3). The number is rounded to whole heads; MethodError if that makes none or
    all of a fraction between 0 and 1.

    Args:
        fraction: of the heads, from 0 to 1.
        num_groups: key heads of a layer.

    Raises:
        MethodError: a fraction between 0 and 1 rounds to none or all, or it is not between 0 and 1.
    """
    if not 0 <= fraction <= 1:
        raise MethodError(f"{fraction} is not a fraction of the heads; give a number from 0 to 1")
    count = round(fraction * num_groups)
    if (0 < fraction < 1) and count in (0, num_groups):
        amount = "none" if count == 0 else "all"
        raise MethodError(
            f"{fraction} of {num_groups} heads rounds to {amount} of them; say 0 or 1 for that"
        )
    return tuple(
        g for g in range(num_groups) if (g + 1) * count // num_groups > g * count // num_groups
    )


@dataclass(frozen=True)
class Unfreeze:
    """Entry of the schedule: the beginning of a phase.

    Attributes:
        at: part of the run's steps after which the phase begins, between 0 and 1.
        layers: the layers that become trainable, in the notation of `layers`; layers that already
            are may be named again.
        learning_rate_factor: factor of the learning-rate schedule from there on, in place of the
            one before.
    """

    at: float
    layers: str
    learning_rate_factor: float = 1.0


def phases_of_layers(schedule: Sequence[Unfreeze], num_layers: int) -> list[int | None]:
    """Return for each layer the phase (from 1) in which the layer becomes trainable.

    None: never.

    Args:
        schedule: entries of attention.unfreeze.
        num_layers: layers of the model.
    """
    phases: list[int | None] = [None] * num_layers
    for phase, entry in enumerate(schedule, start=1):
        for layer in _layers(entry, num_layers):
            if phases[layer] is None:
                phases[layer] = phase
    return phases


def newly_trainable(schedule: Sequence[Unfreeze], phase: int, num_layers: int) -> list[int]:
    """Return the layers that become trainable at the beginning of a phase.

    Args:
        schedule: entries of attention.unfreeze.
        phase: from 1.
        num_layers: layers of the model.
    """
    return [
        layer
        for layer, begin in enumerate(phases_of_layers(schedule, num_layers))
        if begin == phase
    ]


def last_steps(schedule: Sequence[Unfreeze], total_steps: int) -> list[int]:
    """Return s_1, s_2 …: the last step of each phase except the last phase. Steps count from 1.

    Args:
        schedule: entries of attention.unfreeze.
        total_steps: optimizer steps of the run.
    """
    return [round(entry.at * total_steps) for entry in schedule]


def check_unfreeze(schedule: Sequence[Unfreeze], num_layers: int, total_steps: int) -> None:
    """Refuse a schedule with an entry that changes nothing, or at no step of the run.

    Args:
        schedule: entries of attention.unfreeze.
        num_layers: layers of the model.
        total_steps: optimizer steps of the run.

    Raises:
        MethodError: which entry, and why.
    """
    steps = last_steps(schedule, total_steps)
    before = 0
    for phase, (entry, step) in enumerate(zip(schedule, steps, strict=True), start=1):
        if not before < step < total_steps:
            raise MethodError(
                f"attention.unfreeze entry {phase} (at: {entry.at}) is after step {step} of "
                f"{total_steps}; each entry needs a later step than the one before, inside the run"
            )
        if not newly_trainable(schedule, phase, num_layers):
            raise MethodError(
                f"attention.unfreeze entry {phase} (layers: {entry.layers}) makes no further "
                f"layer of the {num_layers} trainable; name others, or leave it out"
            )
        before = step


def _layers(entry: Unfreeze, num_layers: int) -> range:
    try:
        return layer_range(entry.layers, num_layers)
    except MethodError as error:
        raise MethodError(f"attention.unfreeze: {error}") from None
