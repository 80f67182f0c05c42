"""Opening a run: ranks, data, engine, checkpoint, telemetry, and every early refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import check_shards
from megatron_patches.errors import MethodError
from pretrain.checkpoint.checkpoints import Checkpoints
from pretrain.checkpoint.deferred_error import DeferredError
from pretrain.checkpoint.identity import bank_digests, check_bank, run_identity
from pretrain.checkpoint.resuming import find_start
from pretrain.config.resolved import Resolved
from pretrain.config.tree import Config
from pretrain.data.batches import Batches
from pretrain.data.open import Inputs, RunData, check_inputs, open_data
from pretrain.data.prompts import Prompts
from pretrain.errors import UserError
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.gpu_settings import record_collectives, use_arithmetic
from pretrain.ranks.groups import (
    ParallelContext,
    initialize_distributed,
    require_equal_on_all_ranks,
    shutdown_distributed,
)
from pretrain.ranks.watch import NEWEST, Watch, watching
from pretrain.runs.directory import RunDirectory
from pretrain.runs.lock import RunLock
from pretrain.runs.position import Position
from pretrain.runs.storage import ANSWER_SECONDS, answer, stands
from pretrain.telemetry.profile import StepProfile
from pretrain.telemetry.records import AttentionScores, HeldOutLosses, Sample, StepRecord
from pretrain.telemetry.telemetry import Telemetry
from pretrain.training.phase_engine import PhasedEngine
from pretrain.training.rank_zero import lock_run, rank_zero_acting
from pretrain.training.run_files import (
    close_run_files,
    open_run_files,
    phase_line,
    run_facts,
    write_audit,
)
from pretrain.training.validation import attention_scores, continue_prompts, held_out_losses


@dataclass(frozen=True)
class Run:
    """The parts of an open run, for the loop. `telemetry` and `lock` exist on rank 0 only."""

    resolved: Resolved
    context: ParallelContext
    phased: PhasedEngine
    data: RunData
    prompts: Prompts | None
    batches: Batches
    checkpoints: Checkpoints
    position: Position
    telemetry: Telemetry | None
    profile: StepProfile
    watch: Watch
    errors: DeferredError
    lock: RunLock | None

    @property
    def config(self) -> Config:
        """Return what the run was asked for."""
        return self.resolved.config

    @property
    def engine(self) -> Any:
        """Return the current deepspeed.DeepSpeedEngine; `enter_phase_of` may replace it."""
        return self.phased.engine

    def enter_phase_of(self, step: int) -> None:
        """Rebuild the engine if other weights train from `step` on than before (collective)."""
        if self.phased.is_in(step):
            return
        self.watch.at(f"the change of what trains before step {step}")
        self.checkpoints.wait()  # the host has no room for two phases' copies
        self.phased.enter(step)
        self.checkpoints.use_bank(bank_digests(self.engine.module, self.context))
        if self.telemetry is not None:
            self._write_audit()
            facts = run_facts(self.resolved, self.context, self.phased)
            self.telemetry.change_facts(facts, phase_line(self.phased, facts))

    def note_update(self) -> None:
        """Write into audit.json what is to be said of an update that was made (collective)."""
        if self.phased.note_update() and self.telemetry is not None:
            self._write_audit()

    def _write_audit(self) -> None:
        """Write the audit of the live engine beside those of the phases before."""
        directory = self.resolved.directory
        if self._note_lost_lock():
            return
        with self.errors.recording(directory.path):
            write_audit(directory, self.phased)

    def save(self, position: Position, in_background: bool) -> None:
        """Begin a checkpoint, which does not count until `commit` (collective).

        Args:
            position: progress of the run.
            in_background: return once this rank's values are copied; else once its file is written.
        """
        self.watch.at(f"the checkpoint of step {position.step}")
        self._note_lost_lock()
        self.settle()  # the directory may be another training's, with a checkpoint of this step
        note = self.checkpoints.save(self.engine, position, in_background)
        if note is not None:
            self.say(note)

    def validate(self, step: int) -> tuple[HeldOutLosses, tuple[Sample, ...]]:
        """Return held-out losses and the prompts' continuations, which leave the training alone.

        Args:
            step: The last one that was trained.
        """
        self.watch.at(f"the validation after step {step}")
        micro_batch_size = self.config.data.micro_batch_size
        losses = held_out_losses(self.engine, self.data, micro_batch_size, self.context)
        if self.prompts is None:
            return losses, ()
        self.watch.at(f"the samples after step {step}")
        samples = continue_prompts(
            self.engine,
            self.prompts,
            self.config,
            boundary=self.data.boundary,
            context=self.context,
        )
        return losses, samples

    def observe_attention(self, step: int) -> tuple[AttentionScores, ...]:
        """Return each layer's attention on a held-out sample, after a step."""
        self.watch.at(f"the attention after step {step}")
        return attention_scores(self.engine, self.data, self.context)

    def record(self, record: StepRecord, durable: bool = False) -> None:
        """Hand one step's numbers to telemetry (rank 0). A write error is recorded in `errors`.

        Args:
            durable: wait until this record and all before it are on the disk.
        """
        if self.telemetry is not None and not self._note_lost_lock():
            with self.errors.recording(self.config.run_directory.metrics):
                self.telemetry.log(record)
                if durable:
                    self.telemetry.sync()

    def commit(self, good: bool) -> None:
        """Let the checkpoint of `save` count, once its records are durable (collective).

        Raises:
            UserError: on every rank, if they are not, or if a save that is not in the background
                has failed.
        """
        self._note_lost_lock()
        self.settle()
        self.checkpoints.commit(good)

    def mark_good(self) -> None:
        """Mark the newest checkpoint as known good: its weights gave a finite loss."""
        with self.errors.recording(self.resolved.directory.path):
            self.checkpoints.mark_good()

    def has_error(self) -> bool:
        """Return whether this rank has an error for which all must `give_up`."""
        self.checkpoints.has_failed()  # records it
        self._say_what_is_left()
        self._note_lost_lock()
        return self.errors.recorded

    def _note_lost_lock(self) -> bool:
        """Return whether the directory is another training's by now, and record that as an error.

        Asked before each write there: a suspension may have come at any point of a step.
        """
        lost = None if self.lock is None else self.lock.lost
        if lost is not None:
            self.errors.record(UserError(lost))
        return lost is not None

    def _say_what_is_left(self) -> None:
        left = self.checkpoints.take_left()
        if left is not None:
            self.say(left)

    def settle(self) -> None:
        """Return only if no rank has recorded an error (collective).

        Raises UserError: the same on every rank: the error of the first rank that has one.
        """
        if self.errors.recorded_anywhere():
            self.give_up()

    def give_up(self) -> NoReturn:
        """End the run for the error of one rank, once a committed save is done (collective).

        Raises UserError: the same on every rank: the error of the first rank that has one.
        """
        lost = self.lock is not None and self.lock.lost is not None
        self.checkpoints.end(abandoned=lost)  # it is another training's directory then
        self.errors.raise_together()

    def say(self, message: str) -> None:
        """Print one line on the console (rank 0)."""
        if self.telemetry is not None:
            self.telemetry.say(message)

    def leave(self, state: str) -> None:
        """Write the state that the run is left in (rank 0)."""
        if self.telemetry is not None and not self._note_lost_lock():
            with self.errors.recording(self.resolved.directory.path):
                self.resolved.directory.write_state(state)

    def close(self, state: str) -> None:
        """Finish the run directory for this segment: summary if finished, then the state."""
        self.profile.close()
        self._say_what_is_left()
        if self.telemetry is not None and not self._note_lost_lock():
            with self.errors.recording(self.resolved.directory.path):
                close_run_files(self.resolved.directory, self.telemetry, state)
        self.settle()


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Set everything up (collective) and take the process groups down afterwards.

    Nothing is written into the run directory before every refusal that is possible.
    """
    launch = LaunchEnvironment.read()
    inputs = check_inputs(config, launch.world_size)
    directory = inputs.resolved.directory
    use_arithmetic(
        deterministic=config.run.deterministic,
        reduced_precision_reduction=config.performance.reduced_precision_reduction,
    )
    record_collectives(directory.collectives)
    context = initialize_distributed(
        launch, config.parallel.tensor_model_parallel_size, config.parallel.timeout_seconds
    )
    try:
        with watching(
            launch, config.parallel.timeout_seconds, partial(_standing, directory.path)
        ) as watch:
            watch.saved = partial(_saved, directory)
            lock = lock_run(directory.path, context, watch)
            try:
                yield from _opened(_build(inputs, context, watch, lock))
            finally:
                if lock is not None:
                    lock.release()
    except (UserError, DataError, MethodError):
        # All ranks raise these together; after any other error a peer may be gone.
        shutdown_distributed(context)
        raise
    shutdown_distributed(context)


def _standing(run: Path) -> str:
    return f"the file system of {run} takes no byte; look at it" if stands(run) else ""


def _saved(run: RunDirectory) -> str:
    """Return the name of what the run continues from, or its kind if the disk does not say."""
    steps = answer(run.trained_steps, None, ANSWER_SECONDS)
    if steps is None:
        return NEWEST
    return f"step {steps}, the newest saved" if steps else "its start: no step is saved"


def _opened(run: Run) -> Iterator[Run]:
    try:
        yield run
    except (UserError, DataError, MethodError):
        # All ranks raise these together, so all finish what they write.
        run.checkpoints.close(wait=True)
        raise
    finally:
        run.checkpoints.close(wait=False)
        run.batches.close()
        if run.telemetry is not None:
            with suppress(OSError):  # after a good end it is closed already
                run.telemetry.close(failed=True)
    run.phased.close()


def _build(inputs: Inputs, context: ParallelContext, watch: Watch, lock: RunLock | None) -> Run:
    resolved = inputs.resolved
    config = resolved.config
    blend = inputs.blend
    watch.at("the comparison of config and data")
    require_equal_on_all_ranks(
        "the config", config.to_yaml(), "start every rank with the same config and overrides"
    )
    require_equal_on_all_ranks(
        "the training data", blend.fingerprint, "give every node the same shards"
    )
    for manifest in blend.manifests:
        with rank_zero_acting(context, watch):
            if context.is_first:
                check_shards(manifest)
    data = open_data(config.data, blend, seed=config.data_seed, cache=config.sample_cache)
    watch.at("finding the newest checkpoint")
    identity = run_identity(resolved, blend)
    start = find_start(resolved, context, identity)
    position = start.position
    stored = start.stored
    # A trunk is only read.
    resumed = None if stored is None or start.trunk is not None else stored.path
    watch.at("building the model")
    phased = PhasedEngine(resolved, context, position.step, stored)
    identity["frozen_bank"]["sha256"] = bank_digests(phased.engine.module, context)
    if stored is not None:
        check_bank(str(stored.path), stored.about.frozen_bank, identity["frozen_bank"])
    errors = DeferredError(context.device)
    checkpoints = Checkpoints(
        resolved,
        context,
        identity,
        resumed=resumed,
        errors=errors,
        is_lost=lambda: lock is not None and lock.lost is not None,
    )
    watch.at("the order of the samples")
    with rank_zero_acting(context, watch):
        if context.is_first:
            data.samples.prepare(position.consumed_samples)
    telemetry = None
    with rank_zero_acting(context, watch, resolved.directory.path):
        if context.is_first:
            telemetry = open_run_files(resolved, context, data, phased=phased, start=start)
            for line in checkpoints.tidy():
                telemetry.say(line)
    return Run(
        resolved=resolved,
        context=context,
        phased=phased,
        data=data,
        checkpoints=checkpoints,
        position=position,
        telemetry=telemetry,
        prompts=inputs.prompts,
        batches=Batches(data.samples, config.data, resolved.total_steps, context),
        profile=StepProfile(config.telemetry.profile, resolved.directory.profile, context.rank),
        watch=watch,
        errors=errors,
        lock=lock,
    )
