"""The update of an engine's weights, made only from good numbers.

DeepSpeed does not ask before it moves the weights, and what it does with a gradient norm that is
not finite depends on ZeRO stage, precision and settings: it skips the update without a word, or
makes it. All its optimizers end in `step` of the optimizer that this program gave them, after the
global norm is known and, under ZeRO, once for every group. There the decision falls, on the device,
without waiting for it: a hook tells our optimizer whether it is allowed to change weights, states
and step counts. The engine then ends the step as always: its buffers are free for the next one.

Version-sensitive: DeepSpeed 0.19 keeps the global norm in `optimizer._global_grad_norm` when our
optimizer is called, negative or infinite where a part of it was not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Update:
    """The outcome of an update, as numbers on the device.

    Attributes:
        made: 1 if the weights moved, else 0.
        gradient_norm: the global norm before clipping, infinite where it was not finite.
    """

    made: torch.Tensor
    gradient_norm: torch.Tensor


class GuardedUpdate:
    """The optimizer step of one engine. Norms are reduced over all ranks, so all decide alike."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._allowed: torch.Tensor | None = (
            None  # None: nobody has decided, as while a checkpoint is loaded
        )
        self._largest_norm = math.inf
        self._decided: Update | None = None
        self._hook = engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def detach(self) -> None:
        """Let go of the engine."""
        self._hook.remove()
        del self._engine

    def make(self, allowed: torch.Tensor, largest_norm: float = math.inf) -> Update:
        """Step the engine; the weights move if allowed and the norm is finite (collective).

        Waits for the device only where DeepSpeed does, to learn the norm it clips by.

        Args:
            allowed: a truth value on the device, the same on all ranks.
            largest_norm: a norm above it does not move the weights either; the same on all ranks.
        """
        self._allowed, self._largest_norm, self._decided = allowed, largest_norm, None
        self._engine.step()
        self._allowed = None
        self._engine.basic_optimizer.allow(None)
        if self._decided is not None:
            return self._decided
        none = torch.zeros((), dtype=torch.float64, device=allowed.device)
        # DeepSpeed has skipped the update by itself.
        return Update(made=none, gradient_norm=none + torch.inf)

    def _before_update(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if self._allowed is None:
            return
        if self._decided is None:
            self._decided = self._decide(self._allowed)
        optimizer.allow(self._decided.made)

    def _decide(self, allowed: torch.Tensor) -> Update:
        norm = torch.as_tensor(
            self._engine.optimizer._global_grad_norm, dtype=torch.float64, device=allowed.device
        ).reshape(())
        norm = torch.where(norm >= 0, norm, torch.inf)  # NaN too
        good = allowed & norm.isfinite() & (norm <= self._largest_norm)
        return Update(made=good.double(), gradient_norm=norm)
