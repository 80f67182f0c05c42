"""The start of a branch (`schedule.branch_from`): a checkpoint of its trunk, which is only read.

Up to that checkpoint the trunk has trained what the branch would have: the same identity
(`identity`), the same values of the keys whose record says `trunk`, and in every step the learning
rate of the branch. Entries of attention.phases that act later may do so at other steps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.io.files import write_text_atomically
from pretrain.checkpoint.damage import DamagedCheckpoint
from pretrain.checkpoint.format import read_about
from pretrain.checkpoint.identity import same_phases_until
from pretrain.config.keys import KEYS, effective_changes
from pretrain.config.removed import present_key
from pretrain.config.resolved import Resolved
from pretrain.config.schedule import last_stable_step, learning_rate
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory, step_of
from pretrain.runs.environment import earlier_settings
from pretrain.runs.facts import read_facts
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import LEARNING_RATE, METRICS


def branch_points(
    resolved: Resolved, trunk: RunDirectory, identity: Mapping[str, Any]
) -> list[Path]:
    """Return the trunk's complete checkpoints that the run may start from, newest first.

    Args:
        identity: the run's `run_identity`, of which only attention.phases is compared here. If no
            checkpoint agrees with it, all are returned, for `accept_identity` to refuse.

    Raises:
        UserError: the trunk has none, or had another value of a key that decides about its steps.
    """
    _check_keys(resolved.config.values, trunk)
    last = _last_common_step(resolved, trunk)
    complete = trunk.complete_checkpoints()
    points = [path for path in complete if step_of(path) <= last]
    if not points:
        steps = ", ".join(str(step_of(path)) for path in reversed(complete)) or "none"
        raise UserError(
            f"schedule.branch_from={trunk.path} has no complete checkpoint up to step {last}, "
            f"after which its learning rates are not this run's (complete: {steps}); train it "
            "with a checkpoint.every and checkpoint.keep_last that leave one there"
        )
    return [path for path in points if _has_phases_of(identity, path)] or points


def _has_phases_of(identity: Mapping[str, Any], path: Path) -> bool:
    """Return whether the run's phases are those of a checkpoint, up to its step."""
    try:
        saved = read_about(path)
    except DamagedCheckpoint:
        return True  # it is verified later
    return same_phases_until(step_of(path), saved.keys, identity["keys"])


def _check_keys(values: Mapping[str, Mapping[str, Any]], trunk: RunDirectory) -> None:
    """Refuse a trunk that had another value of a key that decides about its steps, at any time."""
    option = f"schedule.branch_from={trunk.path}"
    settings = _facts(trunk.config)
    for change in effective_changes(settings, values):
        if KEYS[change.key].trunk:
            raise UserError(
                f"{option}: {change} in the trunk; set it back, or leave schedule.branch_from out"
            )
    for recorded, _, last in earlier_settings(_facts(trunk.environment)):
        key = present_key(recorded)
        if key in KEYS and KEYS[key].trunk:
            raise UserError(
                f"{option}: {key} changed at step {last + 1}; branch from a run that kept it"
            )


def _last_common_step(resolved: Resolved, trunk: RunDirectory) -> int:
    """Return the last step before this run's decay up to which the trunk had its learning rates."""
    config = resolved.config
    total = resolved.total_steps
    if not trunk.metrics.is_file():
        raise UserError(
            f"schedule.branch_from={trunk.path}: {trunk.metrics} is missing; restore the file"
        )
    records = read_metrics(trunk.metrics)
    last = min(last_stable_step(config.schedule, total), total - 1)
    for record in records:
        step = record["step"]
        if step > last:
            break
        phase = next(phase for phase in reversed(resolved.phases) if phase.first_step <= step)
        rate = (
            learning_rate(config.optimizer, config.schedule, step, total)
            * phase.learning_rate_factor
        )
        if record.get(LEARNING_RATE.tag) != rate:
            return step - 1
    return last


def origin_of(trunk: RunDirectory, step: int) -> dict[str, Any]:
    """Return where a branch comes from, for environment.json.

    Args:
        step: step of the checkpoint that the branch starts from.

    Returns:
        The trunk's directory, the step, the commit that trained it, and when the trunk began, or
        the trunk that it is a branch of itself.
    """
    segments = _facts(trunk.environment).get("segments", [])
    until = [start for start in segments if start["first_step"] <= step]
    segment = until[-1] if until else {}
    first = segments[0] if segments else {}
    started = first.get("branched_from", {}).get("started", first.get("started"))
    return {
        "run": str(trunk.path),
        "step": step,
        "git_commit": segment.get("git_commit"),
        "started": started,
    }


def take_records(trunk: RunDirectory, run: RunDirectory, step: int) -> None:
    """Begin the run's metrics.jsonl with the trunk's records, without what was measured.

    Args:
        step: step of the last record.
    """
    measured = {metric.tag for metric in METRICS if metric.measured}
    records = itertools.takewhile(
        lambda record: record["step"] <= step, read_metrics(trunk.metrics)
    )
    kept = (
        {tag: value for tag, value in entry.items() if tag not in measured} for entry in records
    )
    write_text_atomically(run.metrics, "".join(json.dumps(record) + "\n" for record in kept))


def _facts(path: Path) -> dict[str, Any]:
    try:
        return read_facts(path)
    except UserError as error:
        raise UserError(f"schedule.branch_from={path.parent}: {error}") from None
