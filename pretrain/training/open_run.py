"""Opening a run: ranks, data, engine, checkpoint, telemetry, and every refusal possible before step 1."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from data_pipeline.blend import Blend
from data_pipeline.errors import DataError
from data_pipeline.manifest import check_shards
from megatron_patches.errors import MethodError
from pretrain.checkpoint.checkpoints import Checkpoints, bank_digests, find_newest_checkpoint
from pretrain.config.counting import checkpoint_bytes, count_attention, count_parameters
from pretrain.config.tree import Config
from pretrain.data.batches import Batches
from pretrain.data.inputs import check_inputs
from pretrain.data.open import RunData, open_data
from pretrain.errors import UserError
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.groups import (
    ParallelContext,
    agree,
    initialize_distributed,
    require_equal_on_all_ranks,
    shutdown_distributed,
)
from pretrain.ranks.watch import Watch, watching
from pretrain.runs.directory import RunDirectory
from pretrain.runs.lock import PAUSE, RunLock
from pretrain.runs.position import Position
from pretrain.runs.storage import OF_THE_STORAGE, storage_sentence
from pretrain.telemetry.records import StepRecord
from pretrain.telemetry.telemetry import Telemetry
from pretrain.training.engines import Trainer
from pretrain.training.run_files import (
    changes_since,
    check_steps_left,
    close_run_files,
    headline,
    open_telemetry,
    phase_line,
    run_facts,
    write_audit,
    write_run_files,
)
from pretrain.training.trouble import Trouble

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Everything the loop works with. `telemetry` and `lock` exist on rank 0 only."""

    config: Config
    context: ParallelContext
    trainer: Trainer
    data: RunData
    batches: Batches
    checkpoints: Checkpoints
    position: Position
    telemetry: Telemetry | None
    watch: Watch
    trouble: Trouble
    lock: RunLock | None

    @property
    def engine(self) -> Any:
        """The deepspeed.DeepSpeedEngine of now: do not keep it over `enter_phase_of`."""
        return self.trainer.engine

    def enter_phase_of(self, step: int) -> None:
        """Where other weights are trained from `step` on than before, rebuild the engine (collective)."""
        if not self.trainer.enter(step):
            return
        self.checkpoints.use_bank(bank_digests(self.engine.module, self.context))
        if self.telemetry is not None:
            with self.trouble.writing(self.config.run_path):
                write_audit(self.config, self.trainer)
            facts = run_facts(self.config, self.context, self.trainer)
            self.telemetry.change_facts(facts, phase_line(self.trainer, facts))

    def record(self, record: StepRecord) -> None:
        """Hand one step's numbers to telemetry (rank 0). A file that cannot be written is trouble."""
        if self.telemetry is not None:
            with self.trouble.writing(RunDirectory(self.config.run_path).metrics):
                self.telemetry.log(record)

    def sync_records(self) -> None:
        """Make every recorded step durable; the same of files that cannot be."""
        if self.telemetry is not None:
            with self.trouble.writing(RunDirectory(self.config.run_path).metrics):
                self.telemetry.sync()

    def save(self, position: Position) -> Path:
        """Write a checkpoint, which does not count until `commit` (collective).

        Raises:
            UserError: on every rank, if one of them could not write its part; nothing of it is left.
        """
        self.watch.at(f"the checkpoint of step {position.step}")
        path = RunDirectory(self.config.run_path).checkpoint(position.step)
        with self.trouble.writing(path, self._checkpoint_bytes):
            self.checkpoints.save(self.engine, position)
        try:
            self.trouble.settle()
        except UserError:
            if self.context.is_first:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return path

    def commit(self, saved: Path, proven: bool) -> None:
        """Let a checkpoint of `save` count, unless records or the marker cannot be written (collective).

        Raises:
            UserError: on every rank, if that is so.
        """
        self.trouble.settle()
        with self.trouble.writing(saved):
            self.checkpoints.commit(saved, proven)
        self.trouble.settle()

    def prove(self) -> None:
        """The newest checkpoint's weights gave a finite loss."""
        with self.trouble.writing(self.config.run_path):
            self.checkpoints.prove()

    def _checkpoint_bytes(self) -> int:
        """What a checkpoint takes: as much as the one before or, of the first, as the formula says."""
        newest = self.checkpoints.newest()
        if newest is not None:
            return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        shape = self.config.shape()
        count = count_parameters(shape, count_attention(shape, self.config.policy()))
        return checkpoint_bytes(count, self.config.precision.dtype)

    def in_trouble(self) -> bool:
        """Whether this rank has met what must end the run, `trouble`."""
        if self.lock is not None and (lost := self.lock.lost) is not None:
            self.trouble.note(lost)
        return self.trouble.met

    def say(self, message: str) -> None:
        """One line on the console (rank 0)."""
        if self.telemetry is not None:
            self.telemetry.say(message)

    def leave(self, state: str) -> None:
        """Say in what state the run is left (rank 0)."""
        if self.telemetry is not None:
            with self.trouble.writing(self.config.run_path):
                RunDirectory(self.config.run_path).write_state(state)

    def close(self, state: str) -> None:
        """Finish the run directory for this segment: summary and HParams if finished, then the state."""
        if self.telemetry is not None:
            with self.trouble.writing(self.config.run_path):
                close_run_files(self.config, self.telemetry, state)
        self.trouble.settle()


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Set everything up (collective) and take the process groups down afterwards.

    The run directory is first written when nothing is left that could be refused.
    """
    launch = LaunchEnvironment.read()
    blend = check_inputs(config, launch.world_size)
    context = initialize_distributed(
        launch, config.parallel.tensor_model_parallel_size, config.parallel.timeout_seconds
    )
    try:
        with watching(launch, config.parallel.timeout_seconds) as watch:
            lock = _lock(config, context, watch)
            try:
                yield from _opened(_build(config, context, blend, watch, lock))
            finally:
                if lock is not None:
                    lock.release()
    except (UserError, DataError, MethodError):
        # All ranks raise these together; after any other error a peer may be gone.
        shutdown_distributed(context)
        raise
    shutdown_distributed(context)


def _opened(run: Run) -> Iterator[Run]:
    try:
        yield run
    finally:
        run.batches.close()
        if run.telemetry is not None:
            with suppress(OSError):  # after a good end it is closed already
                run.telemetry.close()
    run.trainer.close()


def _lock(config: Config, context: ParallelContext, watch: Watch) -> RunLock | None:
    """Hold the run directory against every other starter, on rank 0 (collective).

    Raises:
        UserError: on every rank: it is being trained.
    """
    watch.at("the lock of the run directory")
    lock, waiting = RunLock(config.run_path), False
    while True:
        taken = _on_first_rank(context, lock.take)
        if agree([float(taken is False)], context.device)[0] == 0:
            return lock if context.is_first else None
        if context.is_first and not waiting:
            print(lock.waited_for, file=sys.stderr, flush=True)
        waiting = True
        time.sleep(PAUSE)


def _build(config: Config, context: ParallelContext, blend: Blend, watch: Watch, lock: RunLock | None) -> Run:
    watch.at("the comparison of config and data")
    require_equal_on_all_ranks(
        "the config", config.to_yaml(), "start every rank with the same config and overrides"
    )
    require_equal_on_all_ranks("the training data", blend.fingerprint, "give every node the same shards")
    for manifest in blend.manifests:
        _on_first_rank(context, partial(check_shards, manifest))
    data = open_data(config, blend)
    watch.at("building the model")
    newest, step = find_newest_checkpoint(config)
    trainer = Trainer(config, context, step)
    bank = bank_digests(trainer.engine.module, context)
    checkpoints = Checkpoints(config, context, bank, blend)
    watch.at("loading the checkpoint")
    position = checkpoints.resume(trainer.engine, newest)
    _on_first_rank(context, lambda: data.samples.prepare(position.consumed_samples))

    def open_run_files() -> Telemetry:
        check_steps_left(config, position)
        checkpoints.name_latest(newest)
        changes = changes_since(config, position)
        write_run_files(config, context, data, trainer, position, changes)
        telemetry = open_telemetry(config, context, trainer, position)
        telemetry.say(headline(config, context, trainer.audit, position, changes))
        for change in checkpoints.changes:
            telemetry.say(f"changed on resume, as data.allow_change permits: {change}")
        return telemetry

    telemetry = _on_first_rank(context, open_run_files, config.run_path)
    batches = Batches(config, context, data)
    trouble = Trouble(context.device)
    return Run(
        config, context, trainer, data, batches, checkpoints, position, telemetry, watch, trouble, lock
    )


def _on_first_rank(context: ParallelContext, action: Callable[[], T], place: Path = Path()) -> T | None:
    """Do what only rank 0 does, and let every rank raise what the user must mend (collective).

    Args:
        place: where it writes, for errors that do not say.
    """
    result = None
    failure: list[Exception | None] = [None]
    if context.is_first:
        try:
            result = action()
        except (UserError, DataError) as error:
            failure = [error]
        except OSError as error:
            problem = f"rank 0 cannot use {error.filename} ({error.strerror})"
            if error.errno in OF_THE_STORAGE or error.filename is None:
                failure = [UserError(storage_sentence(error, place))]
            else:
                failure = [UserError(f"{problem}; check run.directory and data.directory")]
    dist.broadcast_object_list(failure, src=0, device=context.device)
    if failure[0] is not None:
        raise failure[0]
    return result
