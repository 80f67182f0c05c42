"""Handling of non-finite and spiking losses: checkpoints known good or withdrawn, and the stop.

Bad is what is not finite and, with stability.spike_factor, what is far above its running mean.

A checkpoint is known good once a loss of its very weights was finite. A run that stops here puts
its last step on record, lets no checkpoint count that is not known good, and says where it goes on
from.
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
    """Judge a step: whether the weights before it were good, and whether the run must end.

    Args:
        run: that trains.
        position: progress after the step.
        result: of the step.

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
    what = f"the training loss is {result.loss}"
    if math.isfinite(result.loss):  # DeepSpeed's norm is infinite where the gradient has NaN, too
        what = "the gradient norm is not finite"
    what = f"{spike}," if spike else what
    remedy = "; if the data are meant to be so, raise stability.spike_factor" if spike else ""
    _stop_diverged(
        run, StepRecord(position, result), f"{what} at step {position.step}{times}{remedy}"
    )


def _spike(run: Run, position: Position, result: StepResult) -> str:
    """Name the finite number of a step that was too large; "" for another cause."""
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
    """Require, before a checkpoint, that loss, validation loss and weights are finite (collective).

    Args:
        run: that trains.
        record: of the step before the checkpoint.

    Raises:
        UserError: on every rank, naming what is not.
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
        engine: a deepspeed.DeepSpeedEngine; each rank looks at its own weights.
        device: for the collective.
    """
    held = [held_by_rank(weight) for weight in engine.module.parameters() if weight.requires_grad]
    largest = torch.nn.utils.get_total_norm(
        [own for own in held if own.numel()], norm_type=math.inf
    )
    return agree([float(not torch.isfinite(largest))], device)[0] == 0


def _stop_diverged(run: Run, record: StepRecord, what: str) -> NoReturn:
    run.record(record, durable=True)
    run.checkpoints.withdraw()
    good = run.checkpoints.newest()
    run.leave(DIVERGED)
    raise UserError(
        f"{what}; lower optimizer.learning_rate or raise schedule.warmup_steps; the run resumes "
        f"from {good.name if good else 'the start'}"
    )
