"""Agreement of a finished run's records: half-copied or mixed directories are refused.

The same facts stand in several files of a run, each written by another part of the program. A run
whose files tell two stories is no result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import UserError
from pretrain.runs import tags
from pretrain.runs.curves import RunCurves
from pretrain.runs.directory import ABOUT, RunDirectory, step_of
from pretrain.runs.facts import read_facts

_ROUNDING = 1e-6
"""Relative: a perplexity is the exponential of a loss as both are written."""
_COUNTED = {
    "model_trainable_parameters": tags.TRAINABLE_PARAMETERS,
    "model_frozen_parameters": tags.FROZEN_PARAMETERS,
    "gradient_bytes": tags.GRADIENT_BYTES,
    "optimizer_state_bytes": tags.OPTIMIZER_STATE_BYTES,
}
"""{count in audit.json: the metric that has it in every record}."""

Clash = tuple[Path, str, Any, Path, Any]
"""A file, a key in it, its value there, another file, and the value that follows from that one."""


def read_result(run: RunDirectory, last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json after a comparison with the last record.

    Args:
        run: The run's directory.
        last: The last record of metrics.jsonl.

    Raises:
        UserError: summary.json is missing or damaged, or tells of another result.
    """
    summary = read_facts(run.summary)
    _refuse(_of_summary(run, summary, last))
    return summary


def require_agreement(
    run: RunDirectory, files: Mapping[str, Mapping[str, Any]], curves: RunCurves
) -> None:
    """Refuse a run of which two files contradict each other.

    Args:
        run: The run's directory.
        files: Content of `config`, `environment`, `audit` and `summary`.
        curves: Curves of metrics.jsonl.

    Raises:
        UserError: names both files and the key.
    """
    _refuse(_of_counts(run, files["audit"], curves))
    _refuse(_of_config(run, files, curves))
    _refuse(_of_checkpoint(run, files))


def _refuse(clashes: Iterator[Clash]) -> None:
    for file, key, value, other, expected in clashes:
        raise UserError(
            f"{file} has {key} {_shown(value)}, but by {other} it is {_shown(expected)}: one of "
            "them is not this run's; restore the run's directory, or leave the run out"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _of_summary(
    run: RunDirectory, summary: Mapping[str, Any], last: Mapping[str, Any]
) -> Iterator[Clash]:
    validation = summary["validation"]
    stated = {
        "step": summary["step"],
        "tokens": summary["tokens"],
        tags.VALIDATION_LOSS.tag: validation["loss"],
        tags.PERPLEXITY.tag: validation["perplexity"],
        "samples": summary.get("samples"),
        tags.LOSS.tag: summary.get("loss"),
    }
    optional = ("samples", tags.LOSS.tag)
    for key, value in stated.items():
        if value != last.get(key) and not (key in optional and value is None):
            yield run.summary, key, value, run.metrics, last.get(key)
    recorded = tags.PERPLEXITY_OF_SOURCE.members(last)
    by_source = validation["perplexity_by_source"]
    for source in sorted({*recorded, *by_source}) if recorded else ():
        if by_source.get(source) != recorded.get(source):
            key = tags.PERPLEXITY_OF_SOURCE.of(source)
            yield run.summary, key, by_source.get(source), run.metrics, recorded.get(source)
    loss, perplexity = validation["loss"], validation["perplexity"]
    if loss is not None and perplexity is not None:
        # exp overflows a float above 709.
        expected = math.exp(min(loss, 700.0))
        if not math.isclose(perplexity, expected, rel_tol=_ROUNDING):
            yield run.summary, "perplexity", perplexity, run.summary, f"exp({loss})"


def _of_counts(run: RunDirectory, audit: Mapping[str, Any], curves: RunCurves) -> Iterator[Clash]:
    for key, metric in _COUNTED.items():
        counted, recorded = audit["totals"][key], curves[metric][-1]
        if math.isfinite(recorded) and counted != recorded:
            yield run.audit, f"totals.{key}", counted, run.metrics, int(recorded)


def _of_config(
    run: RunDirectory, files: Mapping[str, Mapping[str, Any]], curves: RunCurves
) -> Iterator[Clash]:
    config, summary = files["config"], files["summary"]
    steps = config["schedule"].get("steps")
    if steps is not None and steps != summary["step"]:
        yield run.config, "schedule.steps", steps, run.summary, summary["step"]
    # Consumed tokens only grow; records of two runs in one file show here.
    fallen = np.flatnonzero(np.diff(curves.tokens) < 0)
    if len(fallen):
        earlier, later = curves.tokens[fallen[0] : fallen[0] + 2].tolist()
        yield run.metrics, "tokens", later, run.metrics, f"at least {earlier}"
    segments = files["environment"].get("segments", [])
    deciding = {"optimizer.learning_rate", "schedule.warmup_steps"}
    changed = any(deciding & segment["changes"].keys() for segment in segments)
    phases = config["attention"].get("phases", True)  # older versions had another name for them
    if not changed and not phases:
        yield from _of_learning_rate(run, config, curves)


def _of_learning_rate(
    run: RunDirectory, config: Mapping[str, Any], curves: RunCurves
) -> Iterator[Clash]:
    """Compare the peak rate, which the last warm-up step reaches and no step exceeds."""
    peak = config["optimizer"]["learning_rate"]
    rates = curves[tags.LEARNING_RATE]
    warm = rates[curves.steps == config["schedule"].get("warmup_steps")]
    highest = float(warm[0] if len(warm) else np.fmax.reduce(rates))
    reached = math.isclose(highest, peak, rel_tol=_ROUNDING)
    if not reached and (highest > peak or (len(warm) and math.isfinite(highest))):
        yield run.config, "optimizer.learning_rate", peak, run.metrics, highest


def _of_checkpoint(run: RunDirectory, files: Mapping[str, Mapping[str, Any]]) -> Iterator[Clash]:
    newest = run.newest_checkpoint()
    if newest is None or not (newest / ABOUT).exists():
        return
    file = newest / ABOUT
    about = read_facts(file)
    summary, position = files["summary"], about["position"]
    if position["step"] != step_of(newest):
        yield file, "position.step", position["step"], newest, step_of(newest)
    pairs = {"tokens": "consumed_tokens", "samples": "consumed_samples"}
    for key, name in pairs.items() if position["step"] == summary["step"] else ():
        if position.get(name, summary.get(key)) != summary.get(key, position.get(name)):
            yield file, f"position.{name}", position[name], run.summary, summary[key]
    for key, value in about["keys"].items():
        section, _, name = key.partition(".")
        configured = files["config"].get(section)
        # Of a file of weights the checkpoint has the content's hash, and config.yaml the path.
        if (
            key == "model.initial_weights"
            or not isinstance(configured, Mapping)
            or name not in configured
        ):
            continue
        if configured[name] != value:
            yield run.config, key, configured[name], file, value
