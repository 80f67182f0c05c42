"""Handling of non-finite and spiking losses: checkpoints known good or withdrawn, and the stop.

A loss or gradient norm is bad if it is not finite or, with stability.spike_factor, far above its
running mean.

A checkpoint is known good once its weights gave a finite loss. A run that stops here records its
last step, withdraws every checkpoint that is not known good, and names the checkpoint from which it
resumes.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from pretrain.checkpoint.slices import held_by_rank
from pretrain.errors import UserError
from pretrain.ranks.groups import agree
from pretrain.runs.directory import DIVERGED
from pretrain.runs.position import Position
from pretrain.runs.tags import VALIDATION_LOSS
from pretrain.telemetry.metrics import validation_metrics
from pretrain.telemetry.records import StepRecord, StepResult
from pretrain.training.open_run import Run


def require_good_step(run: Run, position: Position, result: StepResult) -> None:
    """Mark the weights before a step as good if its loss is finite; end a run of bad steps.

    Args:
        position: Progress after the step.

    Raises:
        UserError: on every rank, after stability.max_skipped steps in a row without an update.
    """
    if math.isfinite(result.loss):
        run.mark_good()
    if result.updated:
        return
    spike = _spike(run, position, result)
    run.say(
        f"step {position.step}/{run.config.total_steps}  no update: loss {result.loss}, "
        f"grad norm {result.gradient_norm}  ({position.skipped_steps} steps skipped so far)"
        + (f": {spike}" if spike else "")
    )
    if position.skipped_in_a_row < run.config.stability.max_skipped:
        return
    times = f", {position.skipped_in_a_row} steps in a row" if position.skipped_in_a_row > 1 else ""
    cause = f"the training loss is {result.loss}"
    if math.isfinite(result.loss):  # DeepSpeed's norm is infinite where the gradient has NaN, too
        cause = "the gradient norm is not finite"
    cause = f"{spike}," if spike else cause
    remedy = "; if the data are meant to be so, raise stability.spike_factor" if spike else ""
    _stop_diverged(
        run, StepRecord(position, result), f"{cause} at step {position.step}{times}{remedy}"
    )


def _spike(run: Run, position: Position, result: StepResult) -> str:
    """Describe the finite number of a step that was too large; "" for another cause."""
    factor = run.config.stability.spike_factor
    if factor is None or not math.isfinite(result.loss + result.gradient_norm):
        return ""
    numbers = {
        "training loss": (result.loss, position.usual_loss),
        "gradient norm": (result.gradient_norm, position.usual_norm),
    }
    for name, (value, usual) in numbers.items():
        if value > usual.limit(factor):
            above = f"more than {factor:g} standard deviations above its mean {usual.mean:.6g}"
            return f"the {name} is {value:.6g}, {above}"
    return ""


def require_good_weights(run: Run, record: StepRecord) -> None:
    """Require finite loss, validation loss and weights before a checkpoint (collective).

    Args:
        record: Record of the step before the checkpoint.

    Raises:
        UserError: on every rank, naming the first that is not finite.
    """
    step = record.position.step
    validation = validation_metrics(record.validation or {}).get(VALIDATION_LOSS.tag, 0.0)
    if not math.isfinite(record.result.loss):
        _stop_diverged(
            run, record, f"the training loss is {record.result.loss} at the last step, {step}"
        )
    if not math.isfinite(validation):
        _stop_diverged(run, record, f"the validation loss is {validation} after step {step}")
    if not weights_are_finite(run.engine, run.context.device):
        _stop_diverged(run, record, f"the weights are not finite after the update of step {step}")


def weights_are_finite(engine: Any, device: torch.device) -> bool:
    """Return whether all trained weights are finite (collective).

    Args:
        engine: A deepspeed.DeepSpeedEngine; each rank checks the weights that it holds.
        device: Device of the collective.
    """
    held = [held_by_rank(weight) for weight in engine.module.parameters() if weight.requires_grad]
    largest = torch.nn.utils.get_total_norm(
        [weight for weight in held if weight.numel()], norm_type=math.inf
    )
    return agree([float(not torch.isfinite(largest))], device)[0] == 0


def _stop_diverged(run: Run, record: StepRecord, cause: str) -> NoReturn:
    # The record first: the run directory must show the bad step even if withdrawing fails.
    run.record(record, durable=True)
    run.checkpoints.withdraw()
    good = run.resolved.directory.newest_checkpoint()
    run.leave(DIVERGED)
    raise UserError(
        f"{cause}; lower optimizer.learning_rate or raise schedule.warmup_steps; the run resumes "
        f"from {good.name if good else 'the start'}"
    )
