"""The update of an engine's weights, made only from good numbers.

DeepSpeed does not ask before it moves the weights, and what it does with a gradient norm that is not finite
depends on ZeRO stage, precision and settings: it skips the update without a word, or makes it. All its
optimizers end in `step` of the AdamW that this program gave them, after the global norm is known and, under
ZeRO, once for every group. There the decision falls: a hook takes the gradients away from an update that is
not to be made, and AdamW leaves a weight without gradient alone, with its moments and its step count. The
engine then ends the step as always: its buffers are free for the next one.

Version-sensitive: DeepSpeed 0.19 keeps the global norm in `optimizer._global_grad_norm` when AdamW is called,
negative or infinite where a part of it was not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Update:
    """What became of an update: whether the weights moved, and the global gradient norm before clipping.

    The norm is NaN or infinite where it was not finite.
    """

    made: bool
    gradient_norm: float


class GuardedUpdate:
    """The optimizer step of one engine. Norms are reduced over all ranks, so all decide alike."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._allowed: bool | None = None  # None: nobody has decided, as while DeepSpeed loads a checkpoint
        self._largest_norm = math.inf
        self._decided: Update | None = None
        self._hook = engine.basic_optimizer.register_step_pre_hook(self._before_adamw)

    def detach(self) -> None:
        """Let go of the engine."""
        self._hook.remove()
        del self._engine

    def make(self, allowed: bool, largest_norm: float = math.inf) -> Update:
        """Step the engine; the weights move if that is `allowed` and the norm is finite (collective).

        A norm above `largest_norm` does not move them either. Of what is `allowed` and how large the norm may
        be, all ranks must say the same.

        Costs no transfer from the device and no collective beyond DeepSpeed's own and reading the norm.
        """
        self._allowed, self._largest_norm, self._decided = allowed, largest_norm, None
        self._engine.step()
        self._allowed = None
        if self._decided is not None:
            return self._decided
        return Update(made=False, gradient_norm=math.inf)  # DeepSpeed has skipped the update by itself

    def _before_adamw(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if self._allowed is None:
            return
        if self._decided is None:
            self._decided = self._decide(self._allowed)
        if not self._decided.made:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _decide(self, allowed: bool) -> Update:
        norm = float(self._engine.optimizer._global_grad_norm)
        norm = norm if norm >= 0 else math.inf  # NaN too
        return Update(allowed and math.isfinite(norm) and norm <= self._largest_norm, norm)
