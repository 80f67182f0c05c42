"""Progress of a run, and running statistics of its loss and gradient norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from data_pipeline.io.forms import Count

_Number = Annotated[float, Field(gt=-1e300, lt=1e300)]
_Variance = Annotated[float, Field(ge=0, lt=1e300)]

MEMORY = 128
"""Good steps over which the mean of a number is taken; older steps weigh a little less."""
TRUSTED_AFTER = 32
"""Good steps needed before a number is judged by the mean."""


@dataclass(frozen=True)
class RunningStats:
    """Running mean and variance over the good steps; equal on all ranks for equal numbers."""

    steps: Count = 0
    mean: _Number = 0.0
    variance: _Variance = 0.0

    def after(self, value: float) -> RunningStats:
        """Return the statistics with one more number.

        The first MEMORY numbers weigh the same; each later one has the weight 1/MEMORY.
        """
        weight = 1 / min(self.steps + 1, MEMORY)
        distance = value - self.mean
        return RunningStats(
            self.steps + 1,
            self.mean + weight * distance,
            (1 - weight) * (self.variance + weight * distance * distance),
        )

    def limit(self, factor: float | None) -> float:
        """Return the mean plus `factor` standard deviations.

        The limit is infinite without a factor and in the first TRUSTED_AFTER steps.
        """
        if factor is None or self.steps < TRUSTED_AFTER:
            return math.inf
        return self.mean + factor * math.sqrt(self.variance)


@dataclass(frozen=True)
class Position:
    """Progress of a run; with the config and the weights, it determines a resume.

    `usual_loss` and `usual_norm` cover the steps that have updated the weights; the norm is taken
    before clipping.
    """

    step: Count = 0
    consumed_samples: Count = 0
    consumed_tokens: Count = 0
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    usual_loss: RunningStats = field(default_factory=RunningStats)
    usual_norm: RunningStats = field(default_factory=RunningStats)

    def after_step(
        self, samples: int, tokens: int, loss: float, gradient_norm: float, updated: bool = True
    ) -> Position:
        """Return the position after one more step.

        Tokens are counted separately from samples, because a resume may change the sequence length.

        Args:
            samples: Samples of the step, over all ranks.
            tokens: Tokens of the step, over all ranks.
            loss: Training loss in nats per token.
            gradient_norm: Global norm before clipping.
            updated: Whether the step moved the weights.
        """
        return Position(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            skipped_steps=self.skipped_steps + (not updated),
            skipped_in_a_row=0 if updated else self.skipped_in_a_row + 1,
            usual_loss=self.usual_loss.after(loss) if updated else self.usual_loss,
            usual_norm=self.usual_norm.after(gradient_norm) if updated else self.usual_norm,
        )
