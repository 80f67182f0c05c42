"""The live engine, and its replacement where a run begins to train more.

DeepSpeed fixes what it trains when it is initialised, so a layer that only gets `requires_grad` later never
moves. Here a new model and a new engine are built for the new phase and take over everything of the old ones,
bit for bit: weights, fp32 masters, both moments and step counts, micro-step and sample counts. What has
become trainable starts from the rows it was frozen with, with zero moments and a step count of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from pretrain.config.phases import phase_at, phases_of
from pretrain.config.tree import Config
from pretrain.model.build import build_model, compile_layers, compiles_layers
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.release import release_engine
from pretrain.training.engine import wrap_model
from pretrain.training.reduction import OverlappedReduction
from pretrain.training.transplant import TrainingState
from pretrain.training.update import GuardedUpdate


class Trainer:
    """The live engine of the current phase, its audit, and the way into the next phase.

    Args:
        step: the last step that was trained (0: none): its phase is the one to build.

    Attributes:
        engine: deepspeed.DeepSpeedEngine; another one after `enter` has answered True.
        update: steps that engine.
        audit: what the live engine was found to hold.

    Raises:
        MethodError: ZeRO holds a frozen weight.
    """

    def __init__(self, config: Config, context: ParallelContext, step: int) -> None:
        self._config = config
        self._context = context
        self.phase = phase_at(config, step)
        self.engine: Any
        self.update: GuardedUpdate
        self.audit: dict[str, Any]
        self._reduction: OverlappedReduction | None
        self._build(None)

    def enter(self, step: int) -> bool:
        """Be in the phase of `step` (collective). True if that took a new engine; the old one is gone."""
        phase = phase_at(self._config, step)
        if phase == self.phase:
            return False
        state = TrainingState.of(self.engine)
        self.close()
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()
        self.phase = phase
        self._build(state)
        return True

    def close(self) -> None:
        """Let go of the engine and, with it, of the model and of the process groups that it holds."""
        self.update.detach()
        if self._reduction is not None:
            self._reduction.detach()
            self._reduction = None
        release_engine(self.engine)
        del self.engine
        gc.collect()  # engine and model hold each other; without this both models would be in memory at once

    def _build(self, state: TrainingState | None) -> None:
        model = build_model(self._config, self._context, self.phase.number)
        if state is not None:
            state.give_weights(model)
        wrapped = wrap_model(model, self._config, self._context)
        if compiles_layers(self._config, self._context.device, self._context.world_size):
            compile_layers(model, "inductor")
        if state is not None:
            state.give_optimizer(wrapped.engine)
        self.engine, self.audit = wrapped.engine, wrapped.audit
        self._reduction = wrapped.reduction
        self.update = GuardedUpdate(self.engine)

    def audit_of_phases(self, on_disk: Mapping[str, Any]) -> dict[str, Any]:
        """The audit for audit.json: of the live engine and, in a run of several phases, of each so far.

        Args:
            on_disk: what audit.json holds already, for the phases before; empty if there is none.
        """
        if len(phases_of(self._config)) == 1:
            return self.audit
        earlier = [entry for entry in on_disk.get("phases", []) if entry["phase"] < self.phase.number]
        own = {
            "phase": self.phase.number,
            "first_step": self.phase.first_step,
            "learning_rate_factor": self.phase.learning_rate_factor,
            "newly_trainable_layers": list(self.phase.newly_trainable),
            **self.audit,
        }
        return {**self.audit, "phases": [*earlier, own]}
