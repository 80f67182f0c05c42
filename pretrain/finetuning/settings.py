"""How a model is trained on a task: the same for every model that is compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """AdamW with a linear warmup and a linear decay to zero.

    Attributes:
        learning_rate: its peak.
        epochs: passes over the training examples, at most.
        batch_size: examples of a step.
        warmup: the part of all steps in which the rate rises.
        weight_decay: of matrices.
        evaluate_every: steps between two looks at the examples set aside; every epoch has one at least.
        patience: so many looks without a better one end the training; 0: it is never ended so.
    """

    learning_rate: float = 5e-5
    epochs: int = 5
    batch_size: int = 32
    warmup: float = 0.06
    weight_decay: float = 0.01
    evaluate_every: int = 500
    patience: int = 3

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def steps_per_epoch(self, examples: int) -> int:
        return -(-examples // self.batch_size)

    def steps_between_looks(self, examples: int) -> int:
        return min(self.evaluate_every, self.steps_per_epoch(examples))
