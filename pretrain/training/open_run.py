"""Opening a run: ranks, data, engine, checkpoint, telemetry, and every refusal possible before step 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from data_pipeline.blend import Blend
from data_pipeline.errors import DataError
from data_pipeline.manifest import check_shards
from megatron_patches.errors import MethodError
from pretrain.checkpoint.checkpoints import Checkpoints, Progress, bank_digests, find_newest_checkpoint
from pretrain.config.counting import (
    count_attention,
    executed_flops_per_token,
    model_flops_per_token,
    peak_flops,
)
from pretrain.config.tree import Config
from pretrain.data.batches import Batches
from pretrain.data.inputs import check_inputs
from pretrain.data.open import RunData, data_facts, open_data
from pretrain.errors import UserError
from pretrain.ranks.groups import (
    LaunchEnvironment,
    ParallelContext,
    initialize_distributed,
    require_equal_on_all_ranks,
    shutdown_distributed,
)
from pretrain.ranks.signals import CONTINUE, FINISHED, RUNNING, STOPPED
from pretrain.runs.directory import describe_environment, write_json, write_state, write_text_atomically
from pretrain.runs.metrics_file import read_metrics
from pretrain.telemetry.hparams import hparams
from pretrain.telemetry.telemetry import RunFacts, StepRecord, Telemetry
from pretrain.training.engines import Trainer

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
    progress: Progress
    telemetry: Telemetry | None

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
            _write_audit(self.config, self.trainer)
            facts = _run_facts(self.config, self.context, self.trainer)
            self.telemetry.change_facts(facts, _phase_line(self.trainer, facts))

    def record(self, record: StepRecord) -> None:
        """Hand one step's numbers to telemetry (rank 0)."""
        if self.telemetry is not None:
            self.telemetry.log(record)

    def sync_records(self) -> None:
        """Make every recorded step durable."""
        if self.telemetry is not None:
            self.telemetry.sync()

    def close(self, state: str) -> None:
        """Finish the run directory for this segment: summary and HParams if finished, then the state."""
        if self.telemetry is not None:
            path = self.config.run_path
            self.telemetry.say(f"{state}: {path}{ENDINGS[state]}")
            if state == FINISHED:
                last = _last_record(path / "metrics.jsonl")
                write_json(path / "summary.json", summary(last))
                results = {tag: last[tag] for tag in RESULT_TAGS if last[tag] is not None}
                self.telemetry.close(results)
            else:
                self.telemetry.close()
            write_state(path, state)
        dist.barrier()


ENDINGS = {
    FINISHED: "",
    STOPPED: " is saved; the same command goes on from here",
    CONTINUE: " is saved and has more to do; the same command goes on from here",
}
RESULT_TAGS = ("perplexity/valid", "loss/valid", "loss/train", "throughput/tokens_per_second")


def summary(last: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says of a finished run, from the last object of metrics.jsonl."""
    by_source = "perplexity/valid/"
    return {
        "step": last["step"],
        "tokens": last["tokens"],
        "samples": last["samples"],
        "loss": last["loss/train"],
        "validation": {
            "loss": last["loss/valid"],
            "perplexity": last["perplexity/valid"],
            "perplexity_by_source": {
                tag.removeprefix(by_source): value for tag, value in last.items() if tag.startswith(by_source)
            },
        },
    }


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
        run = _build(config, context, blend)
        try:
            yield run
        finally:
            run.batches.close()
            if run.telemetry is not None:
                run.telemetry.close()
    except (UserError, DataError, MethodError):
        shutdown_distributed(
            context
        )  # all ranks raise these together; after any other error a peer may be gone
        raise
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
    progress = checkpoints.resume(trainer.engine, newest)
    _on_first_rank(context, lambda: data.samples.prepare(progress.consumed_samples))

    def open_records() -> Telemetry:
        _check_steps_left(config, progress)
        _write_run_files(config, context, data, trainer)
        telemetry = _open_telemetry(config, context, trainer, progress)
        telemetry.say(_headline(config, context, trainer.audit, progress))
        for change in checkpoints.changes:
            telemetry.say(f"changed on resume, as data.allow_change permits: {change}")
        return telemetry

    telemetry = _on_first_rank(context, open_records)
    batches = Batches(config, context, data)
    return Run(config, context, trainer, data, batches, checkpoints, progress, telemetry)


def _write_run_files(config: Config, context: ParallelContext, data: RunData, trainer: Trainer) -> None:
    path = config.run_path
    (path / "summary.json").unlink(missing_ok=True)  # of an earlier end, if the schedule was extended
    write_text_atomically(path / "config.yaml", config.to_yaml())
    _write_audit(config, trainer)
    layout = {
        "device": _device_name(context.device),
        "world_size": context.world_size,
        "tensor_model_parallel_size": context.tensor_parallel_size,
        "data_parallel_size": context.data_parallel_size,
    }
    write_json(path / "environment.json", describe_environment(**layout))
    write_json(path / "data.json", data_facts(config, data))
    write_state(path, RUNNING)


def _write_audit(config: Config, trainer: Trainer) -> None:
    path = config.run_path / "audit.json"
    try:
        on_disk = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or of a run that was killed while it started
        on_disk = {}
    write_json(path, trainer.audit_of_phases(on_disk))


def _check_steps_left(config: Config, progress: Progress) -> None:
    """A finished run may be started again (nothing is left to do), but not with an earlier end."""
    if progress.step < config.total_steps:
        return
    last = _last_record(config.run_path / "metrics.jsonl")
    if progress.step > config.total_steps or "loss/valid" not in last:
        raise UserError(
            f"{config.run_path} has trained {progress.step} steps and the schedule ends at "
            f"{config.total_steps}; set schedule.steps or schedule.tokens to more than that, or choose "
            "another run.name"
        )


def _run_facts(config: Config, context: ParallelContext, trainer: Trainer) -> RunFacts:
    shape, device_name = config.shape(), _device_name(context.device)
    totals = trainer.audit["totals"]
    attention = count_attention(shape, config.policy(), trainer.phase.number)
    return RunFacts(
        world_size=context.world_size,
        device_name=device_name,
        model_flops_per_token=model_flops_per_token(shape, attention),
        executed_flops_per_token=executed_flops_per_token(shape, attention),
        peak_flops_per_device=peak_flops(device_name, config.precision.dtype),
        trainable_parameters=totals["model_trainable_parameters"],
        frozen_parameters=totals["model_frozen_parameters"],
        gradient_bytes=totals["gradient_bytes"],
        optimizer_state_bytes=totals["optimizer_state_bytes"],
    )


def _open_telemetry(
    config: Config, context: ParallelContext, trainer: Trainer, progress: Progress
) -> Telemetry:
    return Telemetry(
        config.run_path,
        _run_facts(config, context, trainer),
        every=config.telemetry.every,
        tensorboard=config.telemetry.tensorboard,
        variance_window=config.telemetry.variance_window,
        hparams=hparams(config),
        total_steps=config.total_steps,
        resume_step=progress.step,
    )


def _phase_line(trainer: Trainer, facts: RunFacts) -> str:
    layers = ", ".join(map(str, trainer.phase.newly_trainable))
    return (
        f"from step {trainer.phase.first_step} on Query and Key train in layer {layers} too: "
        f"{facts.trainable_parameters:,} trainable and {facts.frozen_parameters:,} frozen parameters, "
        f"learning rate x {trainer.phase.learning_rate_factor:g}"
    )


def _headline(config: Config, context: ParallelContext, audit: Mapping[str, Any], progress: Progress) -> str:
    totals = audit["totals"]
    start = f"resumes after step {progress.step}" if progress.step else "starts"
    return (
        f"{config.run_path} {start}: {config.attention.variant}, "
        f"{totals['model_trainable_parameters']:,} trainable and {totals['model_frozen_parameters']:,} "
        f"frozen parameters, tensor parallel {context.tensor_parallel_size} x data parallel "
        f"{context.data_parallel_size} on {_device_name(context.device)}, ZeRO-{audit['zero_stage']}"
    )


def _last_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for record in read_metrics(path):  # noqa: B007
        pass
    return record


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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
