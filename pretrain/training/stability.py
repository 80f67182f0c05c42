"""What a run does about numbers that are not finite, beyond leaving out the update: prove, withdraw, stop.

A checkpoint is known good once a loss of its very weights was finite. A run that stops here puts its last
step on record, lets no checkpoint count that is not known good, and says where it goes on from.
"""

from __future__ import annotations

import math
from typing import NoReturn

from pretrain.checkpoint.health import weights_are_finite
from pretrain.errors import UserError
from pretrain.runs.directory import DIVERGED
from pretrain.runs.position import Position
from pretrain.runs.tags import VALIDATION_LOSS
from pretrain.telemetry.metrics import validation_metrics
from pretrain.telemetry.records import StepRecord, StepResult
from pretrain.training.open_run import Run


def require_good_step(run: Run, position: Position, result: StepResult) -> None:
    """After a step: its loss says whether the weights before it were good.

    Raises:
        UserError: on every rank, after stability.max_skipped steps in a row without an update.
    """
    if math.isfinite(result.loss):
        run.checkpoints.prove()
    if result.updated:
        return
    run.say(
        f"step {position.step}/{run.config.total_steps}  no update: loss {result.loss}, "
        f"grad norm {result.gradient_norm}  ({position.skipped_steps} steps skipped so far)"
    )
    if position.skipped_in_a_row >= run.config.stability.max_skipped:
        number, of_what = result.loss, "training loss"
        if math.isfinite(number):
            number, of_what = result.gradient_norm, "gradient norm"
        times = f", {position.skipped_in_a_row} steps in a row" if position.skipped_in_a_row > 1 else ""
        _stop_diverged(
            run, StepRecord(position, result), f"the {of_what} is {number} at step {position.step}{times}"
        )


def require_good_weights(run: Run, record: StepRecord) -> None:
    """Before a checkpoint: nothing about its weights may be other than finite (collective).

    Raises:
        UserError: on every rank, naming what is not.
    """
    step = record.position.step
    validation = validation_metrics(record.validation or {}).get(VALIDATION_LOSS.tag, 0.0)
    if not math.isfinite(record.result.loss):
        _stop_diverged(run, record, f"the training loss is {record.result.loss} at the last step, {step}")
    if not math.isfinite(validation):
        _stop_diverged(run, record, f"the validation loss is {validation} after step {step}")
    if not weights_are_finite(run.engine, run.context.device):
        _stop_diverged(run, record, f"the weights are not finite after the update of step {step}")


def _stop_diverged(run: Run, record: StepRecord, what: str) -> NoReturn:
    run.record(record)
    run.sync_records()
    run.checkpoints.withdraw()
    good = run.checkpoints.newest()
    run.leave(DIVERGED)
    raise UserError(
        f"{what}; lower optimizer.learning_rate or raise schedule.warmup_steps; the run resumes from "
        f"{good.name if good else 'the start'}"
    )
