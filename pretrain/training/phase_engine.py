"""The live engine, and its replacement where a run begins to train other weights.

DeepSpeed fixes what it trains when it is initialised, so a layer that only gets `requires_grad`
later never moves. Here a new model and a new engine are built for the new phase and take over
everything of the old ones, bit for bit: weights, fp32 masters, the optimizer's states and step
counts, micro-step and sample counts. What has become trainable starts from the rows it was frozen
with, with zero moments and a step count of its own. Rows that are frozen now are buffers with the
bits that they were trained to; digests before and after prove it, and their masters and states are
gone.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from megatron_patches.errors import MethodError
from pretrain.checkpoint.identity import trained_digests
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.config.resolved import Resolved
from pretrain.model.build import build_model, compile_layers
from pretrain.optimizer.reduction import OverlappedReduction
from pretrain.ranks.groups import ParallelContext, together
from pretrain.ranks.release import release_engine
from pretrain.training.engine import wrap_model
from pretrain.training.state_transfer import TrainingState
from pretrain.training.update import Actions, GuardedUpdate, actions_after_update

KEPT_ROWS = "kept_rows"
"""Entry of the audit: digests of the rows that are frozen as they were trained."""


class PhasedEngine:
    """The live engine of the current phase, its audit, and the change into the next phase.

    `step`: the last step that was trained (0: none): its phase is the one to build. `state`: of the
    checkpoint that was saved after it, if there is one. `engine`: deepspeed.DeepSpeedEngine;
    another one after `enter`. `actions`: what is done after its updates.

    Raises MethodError: ZeRO holds a frozen weight, or freezing moved one; UserError: on every rank,
    if the checkpoint is damaged or of another model.
    """

    def __init__(
        self,
        resolved: Resolved,
        context: ParallelContext,
        step: int = 0,
        state: StoredCheckpoint | None = None,
    ) -> None:
        self._resolved = resolved
        self._context = context
        self.phase = resolved.config.phase_at(step)
        self.engine: Any  # its attributes are dynamic, so it cannot be typed usefully
        self._reduction: OverlappedReduction | None
        self.audit: dict[str, Any]
        self.update: GuardedUpdate
        self.actions: Actions
        self._audited: list[dict[str, Any]] = []
        self._build(state)

    def is_in(self, step: int) -> bool:
        """Return whether the live engine is that of the phase of `step`."""
        return self._resolved.config.phase_at(step) == self.phase

    def enter(self, step: int) -> None:
        """Build the engine of the phase of `step`, another one than the live engine's (collective).

        Raises:
            MethodError: freezing has changed rows.
        """
        new = self._resolved.config.phase_at(step)
        state = TrainingState.of(self.engine)
        trained = trained_digests(self.engine.module, self._context, new.newly_kept)
        self.close()
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()
        self.phase = new
        self._build(state)
        kept = self.audit.get(KEPT_ROWS, {})
        moved = [name for name, digest in trained.items() if kept.get(name) != digest]
        if moved:
            raise MethodError(
                f"freezing changed the rows at {moved[0]}, so training was stopped before step "
                f"{step}; this is an error of the program"
            )

    def note_update(self) -> bool:
        """Note in the audit what is to be said of an update that was made (collective).

        Returns:
            Whether the audit has changed.
        """
        notes = {action.name: action.note() for action in self.actions}
        new = {name: note for name, note in notes.items() if note is not None}
        self.audit |= new
        return bool(new)

    def close(self) -> None:
        """Release the engine, and with it the model and the process groups."""
        self.update.detach()
        del self.actions
        if self._reduction is not None:
            self._reduction.detach()
            self._reduction = None
        release_engine(self.engine)
        del self.engine
        # Engine and model hold each other; without this both models would be in memory at once.
        gc.collect()

    def _build(self, state: TrainingState | StoredCheckpoint | None) -> None:
        resolved = self._resolved
        config = resolved.config
        model = build_model(config, self._context, self.phase.number)
        if state is not None:
            with together():
                state.give_weights(model)
        self.engine, self._reduction, self.audit = wrap_model(model, resolved, self._context)
        until_now = resolved.phases[: self.phase.number + 1]
        if kept := {layer for phase in until_now for layer in phase.newly_kept}:
            self.audit[KEPT_ROWS] = trained_digests(model, self._context, kept)
        on_cuda = self._context.device.type == "cuda"
        if config.performance.compiles(on_cuda, resolved.layout.zero_stage):
            compile_layers(model, "inductor")
        if state is not None:
            with together():
                state.give_optimizer(self.engine)
        self.update = GuardedUpdate(self.engine)
        self.actions = actions_after_update(self.engine, config, self._context)

    def audit_of_phases(self, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the audit for audit.json: of the live engine, and of each phase so far.

        Args:
            before: the audit.json of earlier starts, with their phases; None: they are known.
        """
        if before is not None:
            self._audited = list(before.get("phases", []))
        if len(self._resolved.phases) == 1:
            return self.audit
        earlier = [entry for entry in self._audited if entry["phase"] < self.phase.number]
        phase_audit = {
            "phase": self.phase.number,
            "first_step": self.phase.first_step,
            "learning_rate_factor": self.phase.learning_rate_factor,
            "newly_trainable_layers": list(self.phase.newly_trainable),
            "newly_frozen_layers": list(self.phase.newly_kept),
            **self.audit,
        }
        self._audited = [*earlier, phase_audit]
        return {**self.audit, "phases": self._audited}
