"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """How far a run has come; all else that a resume needs follows from this, the config and the weights."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0

    def after_step(self, samples: int, tokens: int, updated: bool = True) -> Position:
        """One step of so many samples and tokens further, whether or not it `updated` the weights.

        Tokens are counted apart from samples: the sequence length may change on the way.
        """
        return Position(
            self.step + 1,
            self.consumed_samples + samples,
            self.consumed_tokens + tokens,
            self.skipped_steps + (not updated),
            0 if updated else self.skipped_in_a_row + 1,
        )
