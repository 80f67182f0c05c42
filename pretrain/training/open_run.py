"""Opening a run: ranks, data, engine, checkpoint, telemetry, and every refusal possible before step 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from data_pipeline.blend import Blend
from data_pipeline.errors import DataError
from data_pipeline.manifest import check_shards
from megatron_patches.errors import MethodError
from pretrain.checkpoint.checkpoints import Checkpoints, bank_digests, find_newest_checkpoint
from pretrain.config.tree import Config
from pretrain.data.batches import Batches
from pretrain.data.inputs import check_inputs
from pretrain.data.open import RunData, open_data
from pretrain.errors import UserError
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.gpu_settings import record_collectives, use_arithmetic
from pretrain.ranks.groups import (
    ParallelContext,
    initialize_distributed,
    require_equal_on_all_ranks,
    shutdown_distributed,
)
from pretrain.runs.directory import RunDirectory
from pretrain.runs.position import Position
from pretrain.telemetry.profile import StepProfile
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

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Everything the loop works with. `telemetry` exists on rank 0 only."""

    config: Config
    context: ParallelContext
    trainer: Trainer
    data: RunData
    batches: Batches
    checkpoints: Checkpoints
    position: Position
    telemetry: Telemetry | None
    profile: StepProfile

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
            write_audit(self.config, self.trainer)
            facts = run_facts(self.config, self.context, self.trainer)
            self.telemetry.change_facts(facts, phase_line(self.trainer, facts))

    def record(self, record: StepRecord) -> None:
        """Hand one step's numbers to telemetry (rank 0)."""
        if self.telemetry is not None:
            self.telemetry.log(record)

    def sync_records(self) -> None:
        """Make every recorded step durable."""
        if self.telemetry is not None:
            self.telemetry.sync()

    def say(self, message: str) -> None:
        """One line on the console (rank 0)."""
        if self.telemetry is not None:
            self.telemetry.say(message)

    def leave(self, state: str) -> None:
        """Say in what state the run is left (rank 0)."""
        if self.telemetry is not None:
            RunDirectory(self.config.run_path).write_state(state)

    def close(self, state: str) -> None:
        """Finish the run directory for this segment: summary and HParams if finished, then the state."""
        self.profile.close()
        if self.telemetry is not None:
            close_run_files(self.config, self.telemetry, state)
        dist.barrier()


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Set everything up (collective) and take the process groups down afterwards.

    The run directory is first written when nothing is left that could be refused.
    """
    launch = LaunchEnvironment.read()
    blend = check_inputs(config, launch.world_size)
    use_arithmetic(
        deterministic=config.run.deterministic,
        reduced_precision_reduction=config.performance.reduced_precision_reduction,
    )
    record_collectives(RunDirectory(config.run_path).collectives)
    context = initialize_distributed(
        launch, config.parallel.tensor_model_parallel_size, config.parallel.timeout_seconds
    )
    try:
        run = _build(config, context, blend)
        try:
            yield run
        finally:
            run.batches.close()
            if run.telemetry is not None:
                run.telemetry.close()
    except (UserError, DataError, MethodError):
        # All ranks raise these together; after any other error a peer may be gone.
        shutdown_distributed(context)
        raise
    run.trainer.close()
    shutdown_distributed(context)


def _build(config: Config, context: ParallelContext, blend: Blend) -> Run:
    require_equal_on_all_ranks(
        "the config", config.to_yaml(), "start every rank with the same config and overrides"
    )
    require_equal_on_all_ranks("the training data", blend.fingerprint, "give every node the same shards")
    for manifest in blend.manifests:
        _on_first_rank(context, partial(check_shards, manifest))
    data = open_data(config, blend)
    newest, step = find_newest_checkpoint(config)
    trainer = Trainer(config, context, step)
    bank = bank_digests(trainer.engine.module, context)
    checkpoints = Checkpoints(config, context, bank, blend)
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

    telemetry = _on_first_rank(context, open_run_files)
    batches = Batches(config, context, data)
    profile = StepProfile(config.telemetry.profile, RunDirectory(config.run_path).profile, context.rank)
    return Run(config, context, trainer, data, batches, checkpoints, position, telemetry, profile)


def _on_first_rank(context: ParallelContext, action: Callable[[], T]) -> T | None:
    """Do what only rank 0 does, and let every rank raise what the user must mend (collective)."""
    result = None
    failure: list[Exception | None] = [None]
    if context.is_first:
        try:
            result = action()
        except (UserError, DataError) as error:
            failure = [error]
        except OSError as error:
            problem = f"rank 0 cannot use {error.filename} ({error.strerror})"
            failure = [UserError(f"{problem}; check run.directory and data.directory")]
    dist.broadcast_object_list(failure, src=0, device=context.device)
    if failure[0] is not None:
        raise failure[0]
    return result
