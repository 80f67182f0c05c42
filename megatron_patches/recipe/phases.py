"""Schedule by which rows of queries and keys begin and cease to train in the course of a run.

    phase 0   steps 1 … s_1          as the variant says, learning rate × 1
    phase i   steps s_i + 1 … s_i+1  layers of entry i begin to train, or are frozen as they are,
                                     learning rate × factor_i

with s_i = `at` times the run's steps, rounded. A layer that begins to train starts from its
frozen rows. A layer that is frozen in the course of the run stays so. A factor multiplies the
whole learning-rate schedule and replaces the previous factor. The rate of rows that will be frozen
may fall to zero before, linearly over `decay_steps` steps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_patches.errors import MethodError

_RANGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(%?)(?:-(\d{1,9}(?:\.\d{1,9})?)(%?))?")


def layer_range(text: str, num_layers: int) -> range:
    """Return the layers that `text` names, counted from 0.

    "all" is every layer, "4" is one layer, "4-7" four of them (both ends count), "33%-67%" the
    layers between these parts of the depth, each end rounded to a whole number of layers, so that
    "0%-50%" and "50%-100%" share none.

    Raises:
        MethodError: the text is no such notation, or the model does not have these layers.
    """
    if text.strip() == "all":
        return range(num_layers)
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise MethodError(f"'{text}' names no layers; write all, 4, 4-7 or 50%-100%")
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
        fraction: fraction of the heads, from 0 to 1.

    Raises:
        MethodError: a fraction between 0 and 1 rounds to none or all, or it is not between 0 and 1.
    """
    if not 0 <= fraction <= 1:
        raise MethodError(f"{fraction} is not a fraction of the heads; give a number from 0 to 1")
    # A group is chosen where the running total passes a whole number, so that ranks share evenly.
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
class PhaseStart:
    """Entry of the schedule: the beginning of a phase.

    Attributes:
        at: fraction of the run's steps after which the phase begins, between 0 and 1.
        freeze: the layers whose rows are frozen as they are, in the notation of `layer_range`;
            frozen layers may be named again. None: none.
        train: the layers that become trainable, likewise.
        learning_rate_factor: factor of the learning-rate schedule from then on; it replaces the
            previous phase's.
        decay_steps: steps before the phase over which the learning rate of the rows that it freezes
            falls to zero. None: it does not.
    """

    at: float
    freeze: str | None = None
    train: str | None = None
    learning_rate_factor: float = 1.0
    decay_steps: int | None = None

    def named(self, what: Literal["freeze", "train"], num_layers: int) -> range:
        """Return the layers that the entry freezes or trains.

        Raises:
            MethodError: the model does not have these layers.
        """
        text = self.freeze if what == "freeze" else self.train
        if text is None:
            return range(0)
        try:
            return layer_range(text, num_layers)
        except MethodError as error:
            raise MethodError(f"attention.phases: {error}") from None


def training_begins(
    schedule: Sequence[PhaseStart], frozen: Sequence[Collection[int]]
) -> list[int | None]:
    """Return for each layer the phase (from 1) in which its frozen rows become trainable.

    None: never, or they train from the start.

    Args:
        schedule: entries of attention.phases.
        frozen: for each layer the key heads that are frozen at the start.

    Raises:
        MethodError: the model does not have the layers of an entry.
    """
    begins: list[int | None] = [None] * len(frozen)
    for phase, entry in enumerate(schedule, start=1):
        for layer in entry.named("train", len(frozen)):
            if frozen[layer] and begins[layer] is None:
                begins[layer] = phase
    return begins


def last_steps(schedule: Sequence[PhaseStart], total_steps: int) -> list[int]:
    """Return s_1, s_2 …: the last step, from 1, of each phase but the last.

    Args:
        schedule: entries of attention.phases.
    """
    return [round(entry.at * total_steps) for entry in schedule]


def check_phases(
    schedule: Sequence[PhaseStart],
    begins: Sequence[int | None],
    ends: Sequence[int | None],
    total_steps: int,
) -> None:
    """Refuse a schedule with an entry that changes nothing, or at no step of the run.

    Args:
        schedule: entries of attention.phases.
        begins: for each layer the phase in which it becomes trainable, as `training_begins` says.
        ends: for each layer the phase from which it is frozen as it was trained.

    Raises:
        MethodError: which entry, and why.
    """
    previous_step = 0
    steps = last_steps(schedule, total_steps)
    for phase, (entry, step) in enumerate(zip(schedule, steps, strict=True), start=1):
        label = f"attention.phases entry {phase}"
        if not previous_step < step < total_steps:
            raise MethodError(
                f"{label} (at: {entry.at}) is after step {step} of {total_steps}; each entry needs "
                "a later step than the one before, inside the run"
            )
        previous_step = step
        if entry.freeze is None and entry.train is None:
            raise MethodError(f"{label} (at: {entry.at}) names no layers; give freeze or train")
        if entry.decay_steps is not None and entry.freeze is None:
            raise MethodError(
                f"{label} (decay_steps: {entry.decay_steps}) freezes no layer whose rate could "
                "fall; give freeze, or leave decay_steps out"
            )
        if entry.decay_steps is not None and entry.decay_steps > step:
            raise MethodError(
                f"{label} (decay_steps: {entry.decay_steps}) is after step {step}, so the decay "
                "would begin before the run; give fewer decay_steps, or a later at"
            )
        if entry.train is not None and phase not in begins:
            raise MethodError(
                f"{label} (train: {entry.train}) makes no further layer of the {len(begins)} "
                "trainable; name others, or leave it out"
            )
        if entry.freeze is not None and phase not in ends:
            raise MethodError(
                f"{label} (freeze: {entry.freeze}) freezes no layer of the {len(ends)} that "
                "trains; name others, or leave it out"
            )
        for layer in entry.named("train", len(ends)):
            if layer in entry.named("freeze", len(ends)):
                raise MethodError(
                    f"{label} (train: {entry.train}, freeze: {entry.freeze}) trains and freezes "
                    f"layer {layer}; name it once"
                )
            end = ends[layer]
            if end is not None and end <= phase:
                raise MethodError(
                    f"{label} (train: {entry.train}) trains layer {layer}, which entry {end} "
                    "freezes; rows that are frozen in the course of a run stay frozen"
                )
