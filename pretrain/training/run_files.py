"""What a run writes into its directory and says at its start and end, beside checkpoints; rank 0 only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from pretrain.config.counting import (
    count_attention,
    executed_flops_per_token,
    model_flops_per_token,
    peak_flops,
)
from pretrain.config.tree import Config
from pretrain.data.open import RunData, data_facts
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import (
    CONTINUE,
    FINISHED,
    RUNNING,
    STOPPED,
    RunDirectory,
    write_json,
    write_text_atomically,
)
from pretrain.runs.environment import describe_environment
from pretrain.runs.metrics_file import last_record
from pretrain.runs.position import Position
from pretrain.runs.summary import summary_of
from pretrain.runs.tags import RESULTS, VALIDATION_LOSS
from pretrain.telemetry.hparams import hparams
from pretrain.telemetry.records import RunFacts
from pretrain.telemetry.telemetry import Telemetry
from pretrain.training.engines import Trainer

ENDINGS = {
    FINISHED: "",
    STOPPED: " is saved; the same command goes on from here",
    CONTINUE: " is saved and has more to do; the same command goes on from here",
}


def check_steps_left(config: Config, position: Position) -> None:
    """A finished run may be started again (nothing is left to do), but not with an earlier end."""
    if position.step < config.total_steps:
        return
    last = last_record(RunDirectory(config.run_path).metrics)
    if position.step > config.total_steps or VALIDATION_LOSS.tag not in last:
        raise UserError(
            f"{config.run_path} has trained {position.step} steps and the schedule ends at "
            f"{config.total_steps}; set schedule.steps or schedule.tokens to more than that, or choose "
            "another run.name"
        )


def write_run_files(config: Config, context: ParallelContext, data: RunData, trainer: Trainer) -> None:
    """Everything that says what the run is, and that it is running."""
    run = RunDirectory(config.run_path)
    run.summary.unlink(missing_ok=True)  # of an earlier end, if the schedule was extended
    write_text_atomically(run.config, config.to_yaml())
    write_audit(config, trainer)
    layout = {
        "device": device_name(context.device),
        "world_size": context.world_size,
        "tensor_model_parallel_size": context.tensor_parallel_size,
        "data_parallel_size": context.data_parallel_size,
    }
    write_json(run.environment, describe_environment(**layout))
    write_json(run.data, data_facts(config, data))
    run.write_state(RUNNING)


def write_audit(config: Config, trainer: Trainer) -> None:
    """What the live engine holds, beside that of the phases before."""
    path = RunDirectory(config.run_path).audit
    try:
        on_disk = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or of a run that was killed while it started
        on_disk = {}
    write_json(path, trainer.audit_of_phases(on_disk))


def close_run_files(config: Config, telemetry: Telemetry, state: str) -> None:
    """Say how this segment ended; of a finished run, its summary and HParams too. The state comes last."""
    run = RunDirectory(config.run_path)
    telemetry.say(f"{state}: {run.path}{ENDINGS[state]}")
    if state == FINISHED:
        last = last_record(run.metrics)
        write_json(run.summary, summary_of(last))
        results = {metric.tag: last[metric.tag] for metric in RESULTS}
        telemetry.close({tag: value for tag, value in results.items() if value is not None})
    else:
        telemetry.close()
    run.write_state(state)


def open_telemetry(
    config: Config, context: ParallelContext, trainer: Trainer, position: Position
) -> Telemetry:
    """Telemetry that goes on after `position`."""
    return Telemetry(
        config.run_path,
        run_facts(config, context, trainer),
        every=config.telemetry.every,
        tensorboard=config.telemetry.tensorboard,
        variance_window=config.telemetry.variance_window,
        hparams=hparams(config),
        total_steps=config.total_steps,
        resume_step=position.step,
    )


def run_facts(config: Config, context: ParallelContext, trainer: Trainer) -> RunFacts:
    """What telemetry counts with, in the phase that the engine is in."""
    shape, device = config.shape(), device_name(context.device)
    totals = trainer.audit["totals"]
    attention = count_attention(shape, config.policy(), trainer.phase.number)
    return RunFacts(
        world_size=context.world_size,
        device_name=device,
        model_flops_per_token=model_flops_per_token(shape, attention),
        executed_flops_per_token=executed_flops_per_token(shape, attention),
        peak_flops_per_device=peak_flops(device, config.precision.dtype),
        trainable_parameters=totals["model_trainable_parameters"],
        frozen_parameters=totals["model_frozen_parameters"],
        gradient_bytes=totals["gradient_bytes"],
        optimizer_state_bytes=totals["optimizer_state_bytes"],
    )


def headline(config: Config, context: ParallelContext, audit: Mapping[str, Any], position: Position) -> str:
    """The first line of a run's log."""
    totals = audit["totals"]
    start = f"resumes after step {position.step}" if position.step else "starts"
    return (
        f"{config.run_path} {start}: {config.attention.variant}, "
        f"{totals['model_trainable_parameters']:,} trainable and {totals['model_frozen_parameters']:,} "
        f"frozen parameters, tensor parallel {context.tensor_parallel_size} x data parallel "
        f"{context.data_parallel_size} on {device_name(context.device)}, ZeRO-{audit['zero_stage']}"
    )


def phase_line(trainer: Trainer, facts: RunFacts) -> str:
    """What a new phase trains."""
    layers = ", ".join(map(str, trainer.phase.newly_trainable))
    return (
        f"from step {trainer.phase.first_step} on Query and Key train in layer {layers} too: "
        f"{facts.trainable_parameters:,} trainable and {facts.frozen_parameters:,} frozen parameters, "
        f"learning rate x {trainer.phase.learning_rate_factor:g}"
    )


def device_name(device: torch.device) -> str:
    """CUDA's name of the device, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
