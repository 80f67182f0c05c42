"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """How far a run has come; all else that a resume needs follows from this, the config and the weights."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0

    def after_step(self, samples: int, tokens: int) -> Position:
        """One optimizer step of so many samples and tokens further.

        Tokens are counted apart from samples: the sequence length may change on the way.
        """
        return Position(self.step + 1, self.consumed_samples + samples, self.consumed_tokens + tokens)
