"""Learning rate and training phases as functions of the step: nothing to save or to restore.

Each phase trains other weights. A checkpoint belongs to the phase of its last step: a resume loads
it into an engine of that phase, then changes phase as the uninterrupted run did
(`training.phase_engine`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patches.recipe.phases import last_steps
from megatron_patches.recipe.policy import QKPolicy
from pretrain.config.optimizer import OptimizerSection
from pretrain.config.sections import ScheduleSection


@dataclass(frozen=True)
class Phase:
    """Steps from `first_step` to the next phase. Most runs have one phase, number 0.

    Attributes:
        number: Number of the phase, from 0.
        first_step: First optimizer step, counted from 1.
        learning_rate_factor: Factor of the whole schedule within the phase.
        newly_trainable: Layers whose rows of queries and keys begin to train.
        newly_kept: Layers whose rows are frozen as they were trained.
        decay_steps: Steps before the phase over which the rate of these rows falls to zero; 0: it
            does not.
    """

    number: int
    first_step: int
    learning_rate_factor: float
    newly_trainable: tuple[int, ...] = ()
    newly_kept: tuple[int, ...] = ()
    decay_steps: int = 0

    @property
    def change(self) -> str:
        """Return which rows begin to train and which no longer train, as a clause."""
        begun = ", ".join(map(str, self.newly_trainable))
        ended = ", ".join(map(str, self.newly_kept))
        clauses = [f"Query/Key of layer {begun} train too"] if begun else []
        clauses += [f"Query/Key of layer {ended} are frozen"] if ended else []
        return ", ".join(clauses)


def phases_of(policy: QKPolicy, sizes: tuple[int, int], total_steps: int) -> tuple[Phase, ...]:
    """Return all phases of a run, in order.

    Args:
        policy: Policy with the entries of `attention.phases`.
        sizes: Layers of the model, and key heads of a layer.
        total_steps: Optimizer steps of the run.
    """
    phases = [Phase(0, 1, 1.0)]
    begins = policy.trained_from(*sizes)
    ends = policy.kept_from(*sizes)
    steps = last_steps(policy.phases, total_steps)
    for number, (entry, step) in enumerate(zip(policy.phases, steps, strict=True), start=1):
        trained, kept = (
            tuple(layer for layer, phase in enumerate(changes) if phase == number)
            for changes in (begins, ends)
        )
        phases.append(
            Phase(
                number,
                step + 1,
                entry.learning_rate_factor,
                newly_trainable=trained,
                newly_kept=kept,
                decay_steps=entry.decay_steps or 0,
            )
        )
    return tuple(phases)


def rates_before_freezing(phases: Sequence[Phase], step: int) -> dict[int, float]:
    """Return {phase: factor of the learning rate of the rows that it freezes}, from 1 to 0.

    With s the last step before the phase and D its `decay_steps`, it is min(1, (s - step) / D), so
    that the rows rest in step s. Phases without `decay_steps` are left out.

    Args:
        phases: Phases of the run.
        step: Optimizer step, counted from 1.
    """
    return {
        phase.number: min(1.0, max(0, phase.first_step - 1 - step) / phase.decay_steps)
        for phase in phases
        if phase.decay_steps
    }


def learning_rate(
    optimizer: OptimizerSection, schedule: ScheduleSection, step: int, total_steps: int
) -> float:
    """Return the learning rate used by optimizer step `step`.

    Steps count from 1. With peak = optimizer.learning_rate, floor = schedule.min_ratio * peak, w =
    schedule.warmup_steps, N = total_steps:

        step <= w:          peak * step / w                   (so step w is the first at the peak)
        step > w:           p = (step - w) / (N - w), in (0, 1]
          cosine            floor + (peak - floor) * (1 + cos(pi p)) / 2
          cosine_restarts   the same with p running from 0 to 1 in each of `cycles` equal cycles;
                            a step on the boundary of two cycles ends the earlier one
          polynomial        floor + (peak - floor) * (1 - p) ** power
          constant          peak
          wsd               peak up to step N - D, then floor + (peak - floor) * (N - step) / D,
                            with D = schedule.decay * N, rounded, and at least 1 unless
                            schedule.decay = 0

    Step N has exactly `floor` (unless constant, without decay, or warmup fills the whole run), and
    so has any later step.

    Args:
        step: Optimizer step, counted from 1.
        total_steps: Optimizer steps of the whole run.

    Raises:
        ValueError: step < 1.
    """
    if step < 1:
        raise ValueError(f"step={step}: steps count from 1")
    peak, warmup = optimizer.learning_rate, schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    begin = warmup if schedule.kind != "wsd" else last_stable_step(schedule, total_steps)
    if schedule.kind == "constant" or step <= begin:
        return peak
    floor = schedule.min_ratio * peak
    return floor + (peak - floor) * _remaining(schedule, step - begin, total_steps - begin)


def last_stable_step(schedule: ScheduleSection, total_steps: int) -> int:
    """Return the step before the decay of a `wsd` schedule; the last step of all without decay."""
    return total_steps - max(round(schedule.decay * total_steps), int(schedule.decay > 0))


def _remaining(schedule: ScheduleSection, done: int, decay_steps: int) -> float:
    """Return the part of peak − floor that is left after `done` steps, from 1 to exactly 0."""
    if done >= decay_steps:
        return 0.0
    if schedule.kind == "wsd":
        return (decay_steps - done) / decay_steps
    if schedule.kind == "polynomial":
        return float((1 - done / decay_steps) ** schedule.power)
    cycles = schedule.cycles if schedule.kind == "cosine_restarts" else 1
    # Whole numbers until the last moment, so that rounding cannot move a cycle's last step into the
    # next cycle.
    cycle_progress = ((done * cycles - 1) % decay_steps + 1) / decay_steps
    return (1 + math.cos(math.pi * cycle_progress)) / 2
