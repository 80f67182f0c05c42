"""The training program: read this file and you know what a run does.

    torchrun --nproc-per-node 8 -m pretrain train pretrain/configs/small.yaml    # or srun
    python -m pretrain train demo --local-ranks 4                                # one machine, CPU

Set up ranks, data, model and engine; resume from the newest complete checkpoint; then for every
step: forward and backward over the micro batches, clip, update if the numbers are good, record;
validate and save when due; stop in good order when a signal asks for it, or when the numbers stay
bad. A checkpoint is copied between two steps and written behind those that follow.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from megatron_patches.model.penalty import take_auxiliary_losses
from pretrain.config.schedule import learning_rate
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
    StepSeconds,
)
from pretrain.training.engine import set_learning_rate
from pretrain.training.held_out import attention_scores, held_out_losses
from pretrain.training.open_run import Run, open_run
from pretrain.training.prompts import continue_prompts
from pretrain.training.stability import require_good_step, require_good_weights
from pretrain.training.step_clock import StepClock
from pretrain.training.weight_norms import WeightsBefore


def train(config: Config, signals: StopSignals) -> str:
    """Train until the schedule's end or a signal.

    Args:
        config: of the run.
        signals: that ask for an early end.

    Returns:
        The state that the run was left in.

    Raises:
        UserError, DataError, MethodError: anything the user can fix, before step 1 wherever it can
            be known then.
    """
    with open_run(config) as run:
        state = run_steps(run, signals)
        run.close(state)
    return state


def run_steps(run: Run, signals: StopSignals) -> str:
    """Run the loop, on every rank in step with the others.

    Args:
        run: as `open_run` yields it.
        signals: that ask for an early end.

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
        # The state to leave the run in, or None to go on: being finished outranks any signal, and a
        # signal waits for a step that can be saved.
        state = (
            FINISHED if position.step == config.total_steps else asked if result.updated else None
        )
        validation: HeldOutLosses | None = None
        samples: tuple[Sample, ...] = ()
        if state == FINISHED or _due(position.step, config.data.validate_every):
            validation, samples = validate(run, position.step)
        stall = None
        if state is not None or (result.updated and _due(position.step, config.checkpoint.every)):
            require_good_weights(run, StepRecord(position, result, None, validation))
            started = time.perf_counter()
            run.save(position, in_background=config.checkpoint.asynchronous and state is None)
            stall = time.perf_counter() - started
        attention: tuple[AttentionScores, ...] = ()
        if _due(position.step, config.telemetry.attention_every):
            run.watch.at(f"the attention after step {position.step}")
            attention = attention_scores(run.engine, run.data, run.context)
        record = StepRecord(
            position,
            result,
            stall,
            validation,
            written=run.checkpoints.take_written(),
            samples=samples,
            attention=attention,
        )
        # On the disk before a checkpoint counts: a resumed run then misses no record.
        run.record(record, durable=stall is not None)
        if stall is not None:
            run.commit(good=validation is not None)
        if state is not None:
            return state
    return FINISHED


def validate(run: Run, step: int) -> tuple[HeldOutLosses, tuple[Sample, ...]]:
    """Return held-out losses and the prompts' continuations, which leave no trace in the training.

    Args:
        run: that trains.
        step: the last one that was trained.
    """
    run.watch.at(f"the validation after step {step}")
    losses = held_out_losses(run.engine, run.data, run.config.data.micro_batch_size, run.context)
    if run.prompts is None:
        return losses, ()
    run.watch.at(f"the samples after step {step}")
    samples = continue_prompts(
        run.engine, run.prompts, run.config, boundary=run.data.boundary, context=run.context
    )
    return losses, samples


def train_step(run: Run, position: Position, signals: StopSignals) -> tuple[StepResult, str | None]:
    """Make one optimizer step over one global batch.

    On a GPU everything is submitted first and read at the end, in one go.

    Args:
        run: that trains.
        position: progress before the step.
        signals: that ask for an early end.

    Returns:
        The step's result, and the state that a signal asks for.
    """
    config, device = run.config, run.context.device
    step = position.step + 1
    rate = learning_rate(config.optimizer, config.schedule, step, config.total_steps)
    rate *= run.phased.phase.learning_rate_factor
    set_learning_rate(run.engine, rate)
    clock = StepClock(device)
    clock.mark()
    run.watch.at(f"step {step}, reading its batch")
    batch = run.batches.at(position.consumed_samples)
    clock.mark()
    run.watch.at(f"step {step}, forward and backward")
    loss, auxiliary = accumulate_gradients(run, batch, step)
    clock.mark()
    run.watch.at(f"step {step}, its loss over all ranks")
    flags = [signals.stop, signals.continue_later, run.has_error()]
    sums = _sum_over_ranks(flags, [loss, *auxiliary.values()])
    clock.mark()
    run.watch.at(f"step {step}, its update")
    factor = config.stability.spike_factor
    mean_loss = sums[len(flags)] / run.context.world_size
    good = sums.isfinite().all() & (mean_loss <= position.usual_loss.limit(factor))
    measured = _due(step, config.telemetry.weights_every)
    before = WeightsBefore.of(run.engine) if measured else None
    with run.phased.qk_clip or nullcontext():
        update = run.phased.update.make(good, largest_norm=position.usual_norm.limit(factor))
    weights = None
    if before is not None:
        patterns = config.telemetry.spectral_norms
        weights = before.norms(run.engine.module.inventory, patterns, run.context)
        del before
    clock.mark()
    if step < config.total_steps:
        run.batches.read(position.consumed_samples + config.data.global_batch_size)
    clock.mark()
    made, norm, *totals = torch.cat(
        [torch.stack([update.made, update.gradient_norm]), sums]
    ).tolist()
    loss_total, asked, terms = _over_ranks(run, totals, auxiliary)
    in_data, in_passes, in_sums, in_update, in_reading = clock.seconds()
    in_step = in_data + in_passes + in_sums + in_update + in_reading
    seconds = StepSeconds(in_step, in_data + in_reading, in_passes, in_update)
    result = StepResult(
        loss_total, terms, norm, rate, seconds=seconds, updated=bool(made), weights=weights
    )
    return result, asked


def accumulate_gradients(
    run: Run, batch: torch.Tensor, step: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run forward and backward over this rank's micro batches.

    The loss is the mean over the predictions of the global batch that count; terms that the model
    adds to it are kept apart.

    Args:
        run: that trains.
        batch: ids, `[micro batches, samples, sequence + 1]`.
        step: the number of the step.

    Returns:
        This rank's parts of the loss and of each term, on the device, for `_sum_over_ranks`.
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
        # DeepSpeed divides by micro batches and ranks: out comes the sum over all of them /
        # predictions.
        weight = micro_batches * context.data_parallel_size / predictions
        loss = losses.sum() * weight
        squares = take_squared_normalisers(engine.module, on_device, run.data.boundary)
        if squares is not None:  # their gradient is in that of the losses
            z_sum = squares * weight + (0.0 if z_sum is None else z_sum)
        auxiliary = take_auxiliary_losses(engine.module)
        engine.backward(sum(auxiliary.values(), loss))
        loss_sum += loss.detach()
        if index < micro_batches - 1:
            # Only counts the micro batch; after the last one, train_step moves the weights.
            engine.step()
    # The other terms are of the weights alone, so they are equal in all micro batches.
    terms = {name: term.detach() for name, term in auxiliary.items()}
    if z_sum is not None:  # every tensor-parallel rank has the whole term, and is to give a share
        share = run.config.model.z_loss / (micro_batches * context.tensor_parallel_size)
        terms["z_loss"] = z_sum * share
    return loss_sum / micro_batches, terms


def _counted_predictions(run: Run, batch: torch.Tensor) -> float:
    """Return the predictions of the global batch that count (collective where ranks differ)."""
    if run.data.boundary is None:
        return run.config.tokens_per_step  # known without asking the other ranks
    total = agree([float(count_predictions(batch, run.data.boundary))], run.context.device)[0]
    return max(1.0, total / run.context.tensor_parallel_size)


def _sum_over_ranks(flags: Sequence[bool], numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum flags, known on the host, and numbers over all ranks (one small all-reduce)."""
    on_device = torch.stack([number.double() for number in numbers])
    raised = torch.tensor(flags, dtype=torch.float64)
    if on_device.is_cuda:
        raised = raised.pin_memory().to(on_device.device, non_blocking=True)
    sums = torch.cat([raised, on_device])
    dist.all_reduce(sums)
    return sums


def _over_ranks(
    run: Run, sums: Sequence[float], auxiliary: Mapping[str, torch.Tensor]
) -> tuple[float, str | None, dict[str, float]]:
    """Read loss, the state that a signal to any rank asks for, and the terms off `_sum_over_ranks`.

    All ranks thus stop after the same step. A term is a tensor-parallel rank's own part. Raises
    UserError: on every rank, if one of them cannot go on.
    """
    stop, continue_later, error, loss, *terms = sums
    if error > 0:
        run.give_up()
    asked = STOPPED if stop > 0 else CONTINUE if continue_later > 0 else None
    named = {
        name: total / run.context.data_parallel_size
        for name, total in zip(auxiliary, terms, strict=True)
    }
    return loss / run.context.world_size, asked, named


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
