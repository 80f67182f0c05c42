"""Phases of a run whose set of trainable weights changes on the way.

Phase and learning-rate factor are functions of the config and the step. A checkpoint belongs to the phase of
its last step: a resume loads it into an engine of that phase and then changes phase as the uninterrupted run
did (see `training.engines`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.recipe.phases import last_steps, newly_trainable
from pretrain.config.tree import Config


@dataclass(frozen=True)
class Phase:
    """Steps `first_step` to the one before the next phase's. Most runs have one phase, number 0."""

    number: int
    first_step: int
    learning_rate_factor: float
    newly_trainable: tuple[int, ...]


def phases_of(config: Config) -> tuple[Phase, ...]:
    """Return all phases of a run, in order."""
    schedule = config.policy().unfreeze
    phases = [Phase(0, 1, 1.0, ())]
    for number, (entry, step) in enumerate(
        zip(schedule, last_steps(schedule, config.total_steps), strict=True), start=1
    ):
        layers = tuple(newly_trainable(schedule, number, config.model.num_layers))
        phases.append(Phase(number, step + 1, entry.learning_rate_factor, layers))
    return tuple(phases)


def phase_at(config: Config, step: int) -> Phase:
    """Return the phase that optimizer step `step` (from 1) belongs to; step 0 is the start of phase 0."""
    return next(phase for phase in reversed(phases_of(config)) if phase.first_step <= max(1, step))
