"""The optimizer's settings over the loading of a checkpoint.

Version-sensitive: DeepSpeed 0.19 saves the optimizer's groups with their weight decay, betas and epsilon, and
at ZeRO stage 1 and 2 the clipping norm, and brings them back with a checkpoint. A run goes by its config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OptimizerSettings:
    """All settings of the optimizer's groups, and the clipping norm, as the config made them."""

    groups: tuple[dict[str, Any], ...]
    clip: float | None

    @classmethod
    def of(cls, engine: Any) -> OptimizerSettings:
        groups = tuple(
            {key: value for key, value in group.items() if key != "params"}
            for group in engine.optimizer.param_groups
        )
        return cls(groups, getattr(engine.optimizer, "clip_grad", None))

    def restore(self, engine: Any) -> None:
        """Make them the engine's again. Raises ValueError: it has another number of groups."""
        for group, settings in zip(engine.optimizer.param_groups, self.groups, strict=True):
            group.update(settings)
        if self.clip is not None:
            engine.optimizer.clip_grad = self.clip
