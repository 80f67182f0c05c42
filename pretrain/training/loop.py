"""The training program: this file shows everything that a run does.

    torchrun --nproc-per-node 8 -m pretrain train pretrain/configs/small.yaml    # or srun
    python -m pretrain train demo --local-ranks 4                                # one machine, CPU

Set up ranks, data, model and engine; resume from the newest complete checkpoint. Then, for every
step: forward and backward over the micro batches, clip, update if the numbers are good, record;
validate and save when due. The run stops cleanly when a signal asks for it, or when the numbers
stay bad. A checkpoint is copied between two steps and written in the background.
"""

from __future__ import annotations

import time

import torch

from megatron_patches.model.penalty import take_auxiliary_losses
from pretrain.config.schedule import learning_rate, rates_before_freezing
from pretrain.config.tree import Config
from pretrain.model.build import take_squared_normalisers, token_losses
from pretrain.model.packing import count_predictions
from pretrain.ranks.groups import agree, set_seeds
from pretrain.ranks.signals import StopSignals
from pretrain.runs.directory import CONTINUE, FINISHED, STOPPED
from pretrain.runs.position import Position
from pretrain.telemetry.records import (
    AttentionScores,
    HeldOutLosses,
    Sample,
    StepRecord,
    StepResult,
)
from pretrain.training.engine import set_learning_rate
from pretrain.training.open_run import Run, open_run
from pretrain.training.stability import require_good_step, require_good_weights
from pretrain.training.step_numbers import Flags, StepClock, StepSums


def train(config: Config, signals: StopSignals) -> str:
    """Train until the schedule's end or a signal; return the state that the run was left in.

    Raises:
        UserError, DataError, MethodError: anything the user can fix, before step 1 wherever it can
            be known then.
    """
    with open_run(config) as run:
        state = run_steps(run, signals)
        run.close(state)
    return state


def run_steps(run: Run, signals: StopSignals) -> str:
    """Run the loop (collective).

    Returns:
        The state to leave the run in, the same on every rank.
    """
    config, position = run.config, run.position
    while position.step < config.total_steps:
        run.enter_phase_of(position.step + 1)
        with run.profile.of(position.step + 1):
            result, asked = train_step(run, position, signals)
        position = position.after_step(
            config.data.global_batch_size,
            config.tokens_per_step,
            result.loss,
            result.gradient_norm,
            updated=result.updated,
        )
        require_good_step(run, position, result)
        if result.updated:
            run.note_update()
        # The state to leave the run in, or None to go on. A finished run outranks any signal, and a
        # signal waits for a step that can be saved.
        state = (
            FINISHED if position.step == config.total_steps else asked if result.updated else None
        )
        validation: HeldOutLosses | None = None
        samples: tuple[Sample, ...] = ()
        if state == FINISHED or _due(position.step, config.data.validate_every):
            validation, samples = run.validate(position.step)
        stall = None
        if state is not None or (result.updated and _due(position.step, config.checkpoint.every)):
            require_good_weights(run, StepRecord(position, result, None, validation))
            started = time.perf_counter()
            run.save(position, in_background=config.checkpoint.asynchronous and state is None)
            stall = time.perf_counter() - started
        attention: tuple[AttentionScores, ...] = ()
        if _due(position.step, config.telemetry.attention_every):
            attention = run.observe_attention(position.step)
        record = StepRecord(
            position,
            result,
            stall,
            validation,
            written=run.checkpoints.take_written(),
            samples=samples,
            attention=attention,
        )
        # Records reach the disk before the checkpoint counts, so a resumed run misses none.
        run.record(record, durable=stall is not None)
        if stall is not None:
            run.commit(good=validation is not None)
        if state is not None:
            return state
    return FINISHED


def train_step(run: Run, position: Position, signals: StopSignals) -> tuple[StepResult, str | None]:
    """Make one optimizer step over one global batch.

    On a GPU all work is submitted first, and the numbers are read once at the end.

    Args:
        position: Progress before the step.

    Returns:
        The step's result, and the state requested by a signal to any rank, the same on all ranks.

    Raises:
        UserError: on every rank, if one of them cannot go on.
    """
    config, step = run.config, position.step + 1
    rate = learning_rate(config.optimizer, config.schedule, step, config.total_steps)
    rate *= run.phased.phase.learning_rate_factor
    set_learning_rate(run.engine, rate, rates_before_freezing(config.phases, step))
    clock = StepClock(run.context.device)
    clock.begin("data")
    run.watch.at(f"step {step}, reading its batch")
    batch = run.batches.at(position.consumed_samples)
    clock.begin("forward and backward")
    run.watch.at(f"step {step}, forward and backward")
    loss, auxiliary = accumulate_gradients(run, batch, step)
    clock.begin("sums")
    run.watch.at(f"step {step}, its loss over all ranks")
    flags = Flags(signals.stop, signals.continue_later, run.has_error())
    sums = StepSums(flags, loss, auxiliary, run.context)
    clock.begin("update")
    run.watch.at(f"step {step}, its update")
    factor = config.stability.spike_factor
    good = sums.are_good(largest_loss=position.usual_loss.limit(factor))
    with run.phased.actions.around_update(step) as measured:
        update = run.phased.update.make(good, largest_norm=position.usual_norm.limit(factor))
    # The next batch is read while the GPU still works on this one.
    clock.begin("next data")
    if step < config.total_steps:
        run.batches.read(position.consumed_samples + config.data.global_batch_size)
    clock.end()
    totals = sums.read(update)
    if totals.asked.error:
        run.give_up()
    result = StepResult(
        totals.loss,
        totals.terms,
        totals.gradient_norm,
        rate,
        seconds=clock.seconds(),
        updated=totals.updated,
        measured=measured,
    )
    asked = totals.asked
    return result, STOPPED if asked.stop else CONTINUE if asked.continue_later else None


def accumulate_gradients(
    run: Run, batch: torch.Tensor, step: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run forward and backward over this rank's micro batches.

    The loss is the mean over the counted predictions of the global batch. Terms that the model adds
    to the loss are reported separately.

    Args:
        batch: Ids, `[micro batches, samples, sequence + 1]`.
        step: Number of the step, for the seeds.

    Returns:
        This rank's parts of the loss and of each term, on the device, for `StepSums`.
    """
    context, engine = run.context, run.engine
    micro_batches = len(batch)
    predictions = _counted_predictions(run, batch)
    loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
    z_sum: torch.Tensor | None = None
    for index, tokens in enumerate(batch):
        global_index = index * context.data_parallel_size + context.data_parallel_rank
        set_seeds(run.config.run.seed, step, global_index, context.tensor_parallel_rank)
        on_device = tokens.to(context.device, non_blocking=True)
        losses = token_losses(engine, on_device, run.data.boundary)
        # DeepSpeed divides by micro batches and ranks; multiplying by both leaves the sum over all
        # of them, divided by the predictions.
        weight = micro_batches * context.data_parallel_size / predictions
        loss = losses.sum() * weight
        squares = take_squared_normalisers(engine.module, on_device, run.data.boundary)
        if squares is not None:  # z-loss: the losses' backward pass adds its gradient
            z_sum = squares * weight + (0.0 if z_sum is None else z_sum)
        auxiliary = take_auxiliary_losses(engine.module)
        engine.backward(sum(auxiliary.values(), loss))
        loss_sum += loss.detach()
        if index < micro_batches - 1:
            # Only counts the micro batch; after the last one, train_step moves the weights.
            engine.step()
    # The other terms depend on the weights only, so they are equal in all micro batches.
    terms = {name: term.detach() for name, term in auxiliary.items()}
    if z_sum is not None:  # every tensor-parallel rank has the whole term; `StepSums` adds them up
        share = run.config.model.z_loss / (micro_batches * context.tensor_parallel_size)
        terms["z_loss"] = z_sum * share
    return loss_sum / micro_batches, terms


def _counted_predictions(run: Run, batch: torch.Tensor) -> float:
    """Count the predictions of the global batch (collective where documents stand alone)."""
    if run.data.boundary is None:
        return run.config.tokens_per_step  # every prediction counts, so nothing to sum
    total = agree([float(count_predictions(batch, run.data.boundary))], run.context.device)[0]
    return max(1.0, total / run.context.tensor_parallel_size)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
