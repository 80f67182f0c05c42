"""The training program: read this file and you know what a run does.

    torchrun --nproc-per-node 8 -m pretrain train pretrain/configs/small.yaml      # or srun, one task per GPU
    python -m pretrain train demo --local-ranks 4                                    # one machine, CPU

Set up ranks, data, model and engine; resume from the newest complete checkpoint; then for every step: forward
and backward over the micro batches, clip, update if the numbers are good, record; validate and save when due;
stop in good order when a signal asks for it, or when the numbers stay bad.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from megatron_patches.auxiliary import take_auxiliary_losses
from pretrain.config.schedule import learning_rate
from pretrain.config.tree import Config
from pretrain.model.build import token_losses
from pretrain.model.packing import count_predictions
from pretrain.ranks.groups import agree, set_seeds
from pretrain.ranks.signals import StopSignals
from pretrain.runs.directory import CONTINUE, FINISHED, STOPPED
from pretrain.runs.position import Position
from pretrain.telemetry.records import StepRecord, StepResult, StepSeconds
from pretrain.training.engine import set_learning_rate
from pretrain.training.held_out import held_out_losses
from pretrain.training.open_run import Run, open_run
from pretrain.training.stability import require_good_step, require_good_weights


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
    config, position = run.config, run.position
    while position.step < config.total_steps:
        run.enter_phase_of(position.step + 1)
        result, asked = train_step(run, position, signals)
        position = position.after_step(
            config.data.global_batch_size,
            config.tokens_per_step,
            result.loss,
            result.gradient_norm,
            updated=result.updated,
        )
        require_good_step(run, position, result)
        # The state to leave the run in, or None to go on: being finished outranks any signal, and a signal
        # waits for a step that can be saved.
        state = FINISHED if position.step == config.total_steps else asked if result.updated else None
        validation = None
        if state == FINISHED or _due(position.step, config.data.validate_every):
            run.watch.at(f"the validation after step {position.step}")
            validation = held_out_losses(run.engine, run.data, config, run.context)
        saved, seconds_checkpoint = None, None
        if state is not None or (result.updated and _due(position.step, config.checkpoint.every)):
            require_good_weights(run, StepRecord(position, result, None, validation))
            started = time.perf_counter()
            saved = run.save(position)
            seconds_checkpoint = time.perf_counter() - started
        run.record(StepRecord(position, result, seconds_checkpoint, validation))
        if saved is not None:
            run.sync_records()  # before the checkpoint counts: a resumed run then misses no record
            run.commit(saved, proven=validation is not None)
        if state is not None:
            return state
    return FINISHED


def train_step(run: Run, position: Position, signals: StopSignals) -> tuple[StepResult, str | None]:
    """One optimizer step over one global batch: its result, and the state that a signal asks for, if any."""
    config, device = run.config, run.context.device
    step = position.step + 1
    rate = learning_rate(config.optimizer, config.schedule, step, config.total_steps)
    rate *= run.trainer.phase.learning_rate_factor
    set_learning_rate(run.engine, rate)
    started = time.perf_counter()
    run.watch.at(f"step {step}, reading its batch")
    batch = run.batches.at(position.consumed_samples)
    seconds_data = time.perf_counter() - started
    run.watch.at(f"step {step}, forward and backward")
    loss, auxiliary = accumulate_gradients(run, batch, step)
    _synchronize(device)
    seconds_forward_backward = time.perf_counter() - started - seconds_data
    run.watch.at(f"step {step}, its loss over all ranks")
    loss, auxiliary, asked = _agree_on(run, loss, auxiliary, signals)
    mark = time.perf_counter()
    run.watch.at(f"step {step}, its update")
    factor = config.stability.spike_factor
    finite = bool(np.isfinite([loss, *auxiliary.values()]).all())
    update = run.trainer.update.make(
        finite and loss <= position.usual_loss.limit(factor), position.usual_norm.limit(factor)
    )
    _synchronize(device)
    seconds_optimizer = time.perf_counter() - mark
    seconds = StepSeconds(
        time.perf_counter() - started, seconds_data, seconds_forward_backward, seconds_optimizer
    )
    return StepResult(loss, auxiliary, update.gradient_norm, rate, seconds, update.made), asked


def accumulate_gradients(run: Run, batch: torch.Tensor, step: int) -> tuple[float, dict[str, float]]:
    """Forward and backward over this rank's micro batches, [micro batches, samples, sequence + 1].

    The loss is the mean over the predictions of the global batch that count; terms that the model adds to it
    are kept apart.

    Returns:
        This rank's parts of the loss and of each term, for `_agree_on`.
    """
    context, engine = run.context, run.engine
    micro_batches, predictions = len(batch), _counted_predictions(run, batch)
    loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
    for index, tokens in enumerate(batch):
        global_index = index * context.data_parallel_size + context.data_parallel_rank
        set_seeds(run.config.run.seed, step, global_index, context.tensor_parallel_rank)
        losses = token_losses(engine, tokens.to(context.device), run.data.boundary)
        # DeepSpeed divides by micro batches and ranks: out comes the sum over all of them / predictions.
        loss = losses.sum() * (micro_batches * context.data_parallel_size / predictions)
        auxiliary = take_auxiliary_losses(engine.module)
        engine.backward(sum(auxiliary.values(), loss))
        loss_sum += loss.detach()
        if index < micro_batches - 1:
            engine.step()  # only counts the micro batch; after the last one, train_step moves the weights
    # The terms are of the weights alone, so they are equal in all micro batches.
    return loss_sum.item() / micro_batches, {name: term.item() for name, term in auxiliary.items()}


def _counted_predictions(run: Run, batch: torch.Tensor) -> float:
    """Predictions of the whole global batch that count (collective where ranks see different numbers)."""
    if run.data.boundary is None:
        return run.config.tokens_per_step  # known without asking the other ranks
    total = agree([float(count_predictions(batch, run.data.boundary))], run.context.device)[0]
    return max(1.0, total / run.context.tensor_parallel_size)


def _agree_on(
    run: Run, loss: float, auxiliary: Mapping[str, float], signals: StopSignals
) -> tuple[float, dict[str, float], str | None]:
    """Loss and terms over all ranks, and the state that a signal to any rank asks for (one small all-reduce).

    All ranks thus stop after the same step. A term is a tensor-parallel rank's own part.

    Raises:
        UserError: on every rank, if one of them cannot go on.
    """
    context = run.context
    own = [loss, float(signals.stop), float(signals.continue_later), float(run.in_trouble())]
    loss_total, stop, continue_later, trouble, *totals = agree([*own, *auxiliary.values()], context.device)
    if trouble > 0:
        run.trouble.tell()
    terms = {name: total / context.data_parallel_size for name, total in zip(auxiliary, totals, strict=True)}
    asked = STOPPED if stop > 0 else CONTINUE if continue_later > 0 else None
    return loss_total / context.world_size, terms, asked


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _synchronize(device: torch.device) -> None:
    """Wait for the GPU, so that the clock around it measures the work and not its submission."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
