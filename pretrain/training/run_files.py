"""Files and lines that describe a run at its start and end, beside checkpoints; rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data_pipeline.io.files import write_json, write_text_atomically
from megatron_patches.recipe.counting import model_flops_per_token
from pretrain.checkpoint.branching import origin_of, take_records
from pretrain.checkpoint.resuming import Start
from pretrain.config.keys import KEYS, Change, effective_changes
from pretrain.config.resolved import FILE_FACTS, Resolved
from pretrain.data.open import RunData, data_facts
from pretrain.errors import UserError
from pretrain.plan.products import Products
from pretrain.ranks.devices import peak_flops
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import CONTINUE, FINISHED, RUNNING, STOPPED, RunDirectory
from pretrain.runs.environment import describe_environment
from pretrain.runs.metrics_file import last_record, summary_of
from pretrain.runs.removal import remove_file
from pretrain.runs.seals import intact_seals
from pretrain.runs.tags import VALIDATION_LOSS
from pretrain.telemetry.hparams import hparams, results
from pretrain.telemetry.records import RunFacts
from pretrain.telemetry.telemetry import Telemetry
from pretrain.training.earlier import Earlier, read_earlier
from pretrain.training.phase_engine import PhasedEngine

ENDINGS = {
    FINISHED: "",
    STOPPED: " is saved; the same command continues from here",
    CONTINUE: " is saved and has more to do; the same command continues from here",
}


def open_run_files(
    resolved: Resolved,
    context: ParallelContext,
    data: RunData,
    phased: PhasedEngine,
    start: Start,
) -> Telemetry:
    """Write the files that describe the run, and open telemetry with its first lines.

    Args:
        resolved: the run's configuration, with its layout.
        phased: the live engine.

    Raises:
        UserError: there are no steps left to train, or settings of a finished run have changed.
    """
    config = resolved.config
    run = resolved.directory
    total_steps = resolved.total_steps
    step = start.position.step
    facts = run_facts(resolved, context, phased)
    check_steps_left(run, total_steps, step)
    summarised = step == total_steps and run.state() == FINISHED
    earlier = read_earlier(run, start, config.checkpoint.fall_back)
    changes = [
        *effective_changes(earlier.settings, config.values),
        *content_changes(resolved.file_digests, earlier),
    ]
    if step == total_steps:
        refuse_changes_of_the_past(run, changes, step)
    begins = headline(run.path, config.attention.variant, context, phased.audit, start=start)
    begins += "".join(f"; from step {step + 1} on {change}" for change in changes)
    environment = environment_of(
        resolved,
        context.device,
        start,
        changes=[*start.layout_changes, *changes],
        earlier=earlier,
    )
    audit = phased.audit_of_phases(earlier.audit)
    write_run_files(resolved, start, audit, environment=environment, data=data_facts(data))
    telemetry = Telemetry(
        run,
        facts,
        every=config.telemetry.every,
        tensorboard=config.telemetry.tensorboard,
        wandb=config.telemetry.wandb,
        variance_window=config.telemetry.variance_window,
        hparams=hparams(config.values),
        total_steps=total_steps,
        resume_step=step,
        summarised=summarised,
    )
    for line in (begins, *start.notes, *earlier.notes):
        telemetry.say(line)
    return telemetry


def check_steps_left(run: RunDirectory, total_steps: int, trained: int) -> None:
    """Refuse an end earlier than the trained steps; a finished run may start again.

    Args:
        run: the run's directory.
        total_steps: last step of the schedule.
        trained: steps of the checkpoint that the run starts from.

    Raises:
        UserError: the run has trained further, or up to there without a validation.
    """
    if trained < total_steps:
        return
    if not run.metrics.is_file():
        raise UserError(
            f"{run.metrics} is missing, though the run has trained {trained} steps; restore it, or "
            "choose another run.name"
        )
    if trained > total_steps or VALIDATION_LOSS.tag not in last_record(run.metrics):
        raise UserError(
            f"{run.path} has trained {trained} steps and the schedule ends at "
            f"{total_steps}; set schedule.steps, tokens or flops to more than that, or choose "
            "another run.name"
        )


def refuse_changes_of_the_past(run: RunDirectory, changes: Sequence[Change], trained: int) -> None:
    """Refuse to give a finished run settings that it was not trained with, where they count.

    Args:
        run: the run's directory.
        changes: keys that differ from config.yaml.
        trained: steps of the run.

    Raises:
        UserError: names the first such key.
    """
    for change in changes:
        if change.key in KEYS and KEYS[change.key].noted:
            raise UserError(
                f"{run.path} has trained all its {trained} steps, but {change}; set it back, set "
                "schedule.steps, tokens or flops to more, or choose another run.name"
            )


def content_changes(file_digests: Mapping[str, str | None], earlier: Earlier) -> list[Change]:
    """Return the changes of files that keys name, whose names have not changed.

    Args:
        file_digests: {key: SHA-256 of the file that it names}; None: it names none.
        earlier: what the run's files, or its trunk's, say.
    """
    changes = [
        Change(f"the content of {key}", earlier.environment.get(FILE_FACTS[key]), digest)
        for key, digest in file_digests.items()
    ]
    return [change for change in changes if change.was and change.was != change.value]


def write_run_files(
    resolved: Resolved,
    start: Start,
    audit: Mapping[str, Any],
    environment: Mapping[str, Any],
    data: Mapping[str, Any],
) -> None:
    """Write the files that describe the run, and the state that says it is running.

    A branch begins with its trunk's records and audit.

    Args:
        resolved: the run's configuration.
        audit: the content of audit.json.
        environment: the content of environment.json, as `environment_of` returns it.
        data: the content of data.json.
    """
    run = resolved.directory
    remove_file(run.summary)  # of an earlier end, if the schedule was extended
    if start.trunk is not None:
        take_records(start.trunk, run, start.position.step)
    write_json(run.audit, audit)
    write_json(run.environment, environment)
    write_json(run.data, data)
    # After the record of the change: a start that dies between them is told of it once more.
    write_text_atomically(run.config, resolved.config.to_yaml())
    run.write_state(RUNNING)


def environment_of(
    resolved: Resolved,
    device: torch.device,
    start: Start,
    changes: Sequence[Change],
    earlier: Earlier,
) -> dict[str, Any]:
    """Return the content of environment.json: the segment that starts, and all of them.

    Args:
        resolved: the run's configuration, with its layout.
        device: device of this rank.
        changes: keys that differ from the segment before.
        earlier: what the run's files say of the segments before.
    """
    first_step, trunk = start.position.step + 1, start.trunk
    earlier_segments = earlier.environment.get("segments", []) if trunk is None else []
    layout = {
        "device": device_name(device),
        # AVX2, AVX512, …: they round differently.
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": torch.get_num_threads(),  # sums are in another order with others
        **resolved.layout.as_dict(),
    }
    environment = describe_environment(**layout)
    segment = {
        **{key: environment[key] for key in ("started", "host", "git_commit", *layout)},
        "first_step": first_step,
        "changes": {change.key: {"was": change.was, "is": change.value} for change in changes},
        **({"data_changes": [*start.data_changes]} if start.data_changes else {}),
        **({} if trunk is None else {"branched_from": origin_of(trunk, first_step - 1)}),
        **({"lost": [*earlier.lost]} if earlier.lost else {}),
        "seals": intact_seals(resolved.config.run_path.resolve().parent),
    }
    digests = {FILE_FACTS[key]: digest for key, digest in resolved.file_digests.items()}
    return {**environment, **digests, "segments": [*earlier_segments, segment]}


def write_audit(run: RunDirectory, phased: PhasedEngine) -> None:
    """Write the audit of the live engine beside those of the phases before."""
    write_json(run.audit, phased.audit_of_phases())


def close_run_files(run: RunDirectory, telemetry: Telemetry, state: str) -> None:
    """Say how this segment ended, and write a finished run's summary; the state comes last.

    Args:
        run: the run's directory.
        state: a key of `ENDINGS`.
    """
    telemetry.say(f"{state}: {run.path}{ENDINGS[state]}")
    if state == FINISHED:
        write_json(run.summary, summary_of(last_record(run.metrics)))
        telemetry.close(results(run))
    else:
        telemetry.close()
    run.write_state(state)


def run_facts(resolved: Resolved, context: ParallelContext, phased: PhasedEngine) -> RunFacts:
    """Return the facts that telemetry counts with, in the engine's phase."""
    config = resolved.config
    products = Products(resolved.shape, resolved.policy, phased.phase.number)
    device = device_name(context.device)
    totals = phased.audit["totals"]
    return RunFacts(
        world_size=context.world_size,
        device_name=device,
        model_flops_per_token=model_flops_per_token(config.shape, config.policy),
        executed_flops_per_token=products.hardware(config.performance),
        peak_flops_per_device=peak_flops(device, config.precision.dtype),
        trainable_parameters=totals["model_trainable_parameters"],
        frozen_parameters=totals["model_frozen_parameters"],
        gradient_bytes=totals["gradient_bytes"],
        optimizer_state_bytes=totals["optimizer_state_bytes"],
    )


def headline(
    run_path: Path, variant: str, context: ParallelContext, audit: Mapping[str, Any], start: Start
) -> str:
    """Return the first line of a run's log, without the changes of its settings.

    Args:
        audit: audit of the live engine.
    """
    totals, step = audit["totals"], start.position.step
    begins = f"resumes after step {step}" if step else "starts"
    if start.trunk is not None:
        begins = f"starts as a branch of {start.trunk.path}, after its step {step}"
    return (
        f"{run_path} {begins}: {variant}, "
        f"{totals['model_trainable_parameters']:,} trainable and "
        f"{totals['model_frozen_parameters']:,} frozen parameters, "
        f"tensor parallel {context.tensor_parallel_size} x data parallel "
        f"{context.data_parallel_size} on {device_name(context.device)}, ZeRO-{audit['zero_stage']}"
    )


def phase_line(phased: PhasedEngine, facts: RunFacts) -> str:
    """Return the line that names what a new phase trains, and what it no longer does."""
    return (
        f"from step {phased.phase.first_step} on {phased.phase.change}: "
        f"{facts.trainable_parameters:,} trainable and {facts.frozen_parameters:,} frozen "
        f"parameters, learning rate x {phased.phase.learning_rate_factor:g}"
    )


def device_name(device: torch.device) -> str:
    """Return CUDA's name of the device, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
