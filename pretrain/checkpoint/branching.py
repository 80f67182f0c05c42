"""The start of a branch (`schedule.branch_from`): a checkpoint of its trunk, which is only read.

Up to that checkpoint the trunk has trained what the branch would have: the same identity (`identity`), the
same values of the keys whose record says `trunk`, and in every step the learning rate of the branch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.keys import KEYS, effective_changes
from pretrain.config.phases import phases_of
from pretrain.config.schedule import last_stable_step, learning_rate
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory, step_of, write_text_atomically
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import LEARNING_RATE, METRICS

_MEASURED = frozenset(metric.tag for metric in METRICS if metric.measured)


def branch_points(config: Config, trunk: RunDirectory) -> list[Path]:
    """Return the trunk's complete checkpoints that the run may start from, newest first.

    Raises:
        UserError: there is none, or the trunk is no run, or was trained with another value of a key.
    """
    _check_keys(config, trunk)
    last, reason = _last_common_step(config, trunk)
    complete = trunk.complete_checkpoints()
    points = [path for path in complete if step_of(path) <= last]
    if not points:
        there = ", ".join(str(step_of(path)) for path in reversed(complete)) or "none"
        raise UserError(
            f"schedule.branch_from={trunk.path} has no complete checkpoint up to step {last}, {reason} "
            f"(complete: {there}); train the trunk with a checkpoint there and a checkpoint.keep_last that "
            "keeps it"
        )
    return points


def _check_keys(config: Config, trunk: RunDirectory) -> None:
    """Refuse a trunk that had another value of a key that decides about its steps, at any time."""
    before = _content(trunk.config)
    remedy = "a branch needs its trunk's value: set it, or leave schedule.branch_from out"
    for change in effective_changes(before, config):
        if KEYS[change.key].trunk:
            raise UserError(f"schedule.branch_from={trunk.path}: {change} in the trunk; {remedy}")
    for segment in _content(trunk.environment).get("segments", []):
        for key in segment["changes"]:
            if key in KEYS and KEYS[key].trunk:
                raise UserError(
                    f"schedule.branch_from={trunk.path}: {key} changed there at step "
                    f"{segment['first_step']}; branch from a run that kept it"
                )


def _last_common_step(config: Config, trunk: RunDirectory) -> tuple[int, str]:
    """Return the last step after which the branch may start, and a clause that says why not later."""
    total = config.total_steps
    last = min(last_stable_step(config.schedule, total), total - 1)
    phases = phases_of(config)
    for record in _records(trunk):
        step = record["step"]
        if step > last:
            break
        phase = next(phase for phase in reversed(phases) if phase.first_step <= step)
        rate = learning_rate(config.optimizer, config.schedule, step, total) * phase.learning_rate_factor
        if record.get(LEARNING_RATE.tag) != rate:
            return step - 1, f"after which the learning rate of the trunk is not this run's {rate:g}"
    return last, "after which this run's decay begins"


def origin_of(trunk: RunDirectory, step: int) -> dict[str, Any]:
    """Return where a branch comes from, for environment.json: run, step, and the commit that trained it."""
    segments = _content(trunk.environment).get("segments", [])
    commits = [segment.get("git_commit") for segment in segments if segment["first_step"] <= step]
    return {"run": str(trunk.path), "step": step, "git_commit": commits[-1] if commits else None}


def take_records(trunk: RunDirectory, run: RunDirectory, step: int) -> None:
    """Begin the run's metrics.jsonl with the trunk's records up to `step`, without what a clock measured."""
    kept = (
        {tag: value for tag, value in record.items() if tag not in _MEASURED}
        for record in _records(trunk)
        if record["step"] <= step
    )
    write_text_atomically(run.metrics, "".join(json.dumps(record) + "\n" for record in kept))


def _records(trunk: RunDirectory) -> Iterator[dict[str, Any]]:
    if not trunk.metrics.is_file():
        raise UserError(f"schedule.branch_from={trunk.path}: {trunk.metrics} is missing; restore the file")
    return read_metrics(trunk.metrics)


def _content(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file of the trunk."""
    try:
        content = yaml.safe_load(path.read_text()) if path.suffix == ".yaml" else json.loads(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"schedule.branch_from={path.parent}: {path.name} cannot be read ({error}); give the directory "
            "of a run"
        ) from None
    return content if isinstance(content, dict) else {}
