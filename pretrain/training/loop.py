"""The training program: read this file and you know what a run does.

    torchrun --nproc-per-node 8 -m pretrain train pretrain/configs/small.yaml      # or srun, one task per GPU
    python -m pretrain train demo --local-ranks 4                                    # one machine, CPU

Set up ranks, data, model and engine; resume from the newest complete checkpoint; then for every step: forward
and backward over the micro batches, clip, update, record; validate and save when due; stop in good order when
a signal asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from megatron_patches.auxiliary import take_auxiliary_losses
from pretrain.checkpoint.checkpoints import Progress
from pretrain.config.schedule import learning_rate
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.model.build import token_losses
from pretrain.model.packing import count_predictions
from pretrain.ranks.groups import agree, set_seeds
from pretrain.ranks.signals import CONTINUE, FINISHED, STOPPED, StopSignals
from pretrain.telemetry.telemetry import StepRecord
from pretrain.training.engine import set_learning_rate
from pretrain.training.held_out import Losses, held_out_losses
from pretrain.training.open_run import Run, open_run


def train(config: Config, signals: StopSignals) -> str:
    """Train until the schedule's end or a signal; returns the state the run was left in.

    Raises:
        UserError, DataError, MethodError: anything the user can mend, before step 1 wherever it can be known
            then.
    """
    with open_run(config) as run:
        state = run_steps(run, signals)
        run.close(state)
    return state


def run_steps(run: Run, signals: StopSignals) -> str:
    """The loop. Every rank runs it in step with the others and leaves it with the same answer."""
    config, progress = run.config, run.progress
    while progress.step < config.total_steps:
        run.enter_phase_of(progress.step + 1)
        result = train_step(run, progress, signals)
        progress = progress.after_step(config)
        if not np.isfinite(result.loss):
            _stop_diverged(run, progress, result)
        state = _state_after(progress.step, config.total_steps, result)
        validation = None
        if state == FINISHED or _due(progress.step, config.data.validate_every):
            validation = held_out_losses(run.engine, run.data, config, run.context)
        saved, seconds_checkpoint = None, None
        if state is not None or _due(progress.step, config.checkpoint.every):
            started = time.perf_counter()
            saved = run.checkpoints.save(run.engine, progress)
            seconds_checkpoint = time.perf_counter() - started
        run.record(_step_record(config, progress, result, seconds_checkpoint, validation))
        if saved is not None:
            # The record is on disk before the checkpoint counts, so a resumed run misses no step in
            # metrics.jsonl.
            run.sync_records()
            run.checkpoints.commit(saved)
        if state is not None:
            return state
    return FINISHED


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, equal on every rank except for the times (seconds)."""

    loss: float
    auxiliary: Mapping[str, float]
    gradient_norm: float
    learning_rate: float
    stop: bool
    continue_later: bool
    seconds_step: float
    seconds_data: float
    seconds_forward_backward: float
    seconds_optimizer: float


def train_step(run: Run, progress: Progress, signals: StopSignals) -> StepResult:
    """One optimizer step over one global batch.

    The loss is the mean over the predictions of the global batch that count; terms that the model adds to it
    are reported apart. Signals are agreed on here, in the same small all-reduce as the loss, so that all
    ranks stop after the same step.
    """
    config, context, engine = run.config, run.context, run.engine
    step = progress.step + 1
    rate = learning_rate(config.optimizer, config.schedule, step, config.total_steps)
    rate *= run.trainer.phase.learning_rate_factor
    set_learning_rate(engine, rate)
    loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
    micro_batches = config.gradient_accumulation_steps(context.world_size)
    started = time.perf_counter()
    batch = run.batches.at(progress.consumed_samples)
    seconds_data = time.perf_counter() - started
    predictions = _counted_predictions(run, batch)
    for index, tokens in enumerate(batch):
        global_index = index * context.data_parallel_size + context.data_parallel_rank
        set_seeds(config.run.seed, step, global_index, context.tensor_parallel_rank)
        losses = token_losses(engine, tokens.to(context.device), run.data.boundary)
        # DeepSpeed divides by micro batches and ranks: out comes the sum over all of them / predictions.
        loss = losses.sum() * (micro_batches * context.data_parallel_size / predictions)
        auxiliary = take_auxiliary_losses(engine.module)
        engine.backward(sum(auxiliary.values(), loss))
        loss_sum += loss.detach()
        if index < micro_batches - 1:
            engine.step()  # DeepSpeed counts the micro batch; the weights move after the last one, below
    _synchronize(context.device)
    seconds_forward_backward = time.perf_counter() - started - seconds_data
    mark = time.perf_counter()
    engine.step()
    _synchronize(context.device)
    seconds_optimizer = time.perf_counter() - mark
    # Auxiliary terms are a tensor-parallel rank's own part, and of the weights: equal in all micro batches.
    terms = [term.item() for term in auxiliary.values()]
    loss_total, stop, continue_later, *terms = agree(
        [loss_sum.item() / micro_batches, float(signals.stop), float(signals.continue_later), *terms],
        context.device,
    )
    return StepResult(
        loss=loss_total / context.world_size,
        auxiliary={
            name: term / context.data_parallel_size for name, term in zip(auxiliary, terms, strict=True)
        },
        gradient_norm=float(engine.get_global_grad_norm()),
        learning_rate=rate,
        stop=stop > 0,
        continue_later=continue_later > 0,
        seconds_step=time.perf_counter() - started,
        seconds_data=seconds_data,
        seconds_forward_backward=seconds_forward_backward,
        seconds_optimizer=seconds_optimizer,
    )


def _counted_predictions(run: Run, batch: torch.Tensor) -> float:
    """Predictions of the whole global batch that count (collective where ranks see different numbers)."""
    if run.data.boundary is None:
        return run.config.tokens_per_step  # known without asking the other ranks
    total = agree([float(count_predictions(batch, run.data.boundary))], run.context.device)[0]
    return max(1.0, total / run.context.tensor_parallel_size)


def _state_after(step: int, total_steps: int, result: StepResult) -> str | None:
    """The state to leave the run in after this step, or None to go on. Being finished outranks any signal."""
    if step == total_steps:
        return FINISHED
    if result.stop:
        return STOPPED
    return CONTINUE if result.continue_later else None


def _stop_diverged(run: Run, progress: Progress, result: StepResult) -> NoReturn:
    """The weights are lost: put the step on record, save nothing, and say where to go on from."""
    run.record(_step_record(run.config, progress, result, None, None))
    run.sync_records()
    newest = run.checkpoints.newest()
    raise UserError(
        f"the training loss is {result.loss} at step {progress.step}; lower optimizer.learning_rate or raise "
        f"schedule.warmup_steps; the run resumes from {newest.name if newest else 'the start'}"
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step_record(
    config: Config,
    progress: Progress,
    result: StepResult,
    seconds_checkpoint: float | None,
    validation: Losses | None,
) -> StepRecord:
    return StepRecord(
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        loss=result.loss,
        auxiliary=result.auxiliary,
        learning_rate=result.learning_rate,
        gradient_norm=result.gradient_norm,
        seconds_step=result.seconds_step,
        seconds_data=result.seconds_data,
        seconds_forward_backward=result.seconds_forward_backward,
        seconds_optimizer=result.seconds_optimizer,
        seconds_checkpoint=seconds_checkpoint,
        validation=validation,
    )


def _synchronize(device: torch.device) -> None:
    """Wait for the GPU, so that the clock around it measures the work and not its submission."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
