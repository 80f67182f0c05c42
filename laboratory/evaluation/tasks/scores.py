"""Scores of a model on a task, and on a group of tasks by the group's own rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.group import Group


@dataclass(frozen=True)
class Score:
    """Score on a task by one metric.

    Attributes:
        value: The score.
        stderr: The harness's own standard error over items; None where there is none.
        higher_is_better: False for a perplexity.
        items: The metric of every item in order, if all are numbers; of a group, task by task.
    """

    value: float
    stderr: float | None
    higher_is_better: bool
    items: tuple[float, ...] = ()


@dataclass(frozen=True)
class TaskScores:
    """Scores of one model on one task.

    Attributes:
        scores: {metric: its score}; a metric has its filter's name too where that is not `none`.
        items: Number of items.
        cut: Number of requests longer than the model's context, of which it saw the last part only.
    """

    scores: Mapping[str, Score]
    items: int
    cut: int = 0


def task_scores(results: Mapping[str, Any], name: str, cut: int) -> TaskScores:
    """Return the scores of one task.

    Args:
        results: Results of the harness's `evaluate`, `samples` included.
        cut: Number of requests longer than the model's context.
    """
    result = results["results"][name]
    better = results["higher_is_better"].get(name) or {}
    scores = {}
    for metric, which, value, error in _metrics(result):
        items = [
            sample.get(metric) for sample in results["samples"][name] if sample["filter"] == which
        ]
        # What is aggregated from pairs, such as F1, has no numbers of items.
        own_items = tuple(map(float, items)) if all(map(_is_number, items)) else ()
        scores[_full_name(metric, which)] = Score(
            value, error, better.get(metric) is not False, own_items
        )
    return TaskScores(scores, int(result["sample_len"]), cut)


def group_scores(group: Group, parts: Mapping[str, TaskScores]) -> TaskScores:
    """Return the harness's numbers of a group from those of its tasks.

    Args:
        group: The harness's own object.
        parts: {name: scores} of its tasks.
    """
    flat: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        flat[name] = {"sample_len": part.items}
        for metric, score in part.scores.items():
            key, _, which = metric.partition(",")
            flat[name][f"{key},{which or 'none'}"] = score.value
            flat[name][f"{key}_stderr,{which or 'none'}"] = (
                "N/A" if score.stderr is None else score.stderr
            )
    whole = group.aggregate(flat)
    first = next(iter(parts.values())).scores
    scores = {}
    for metric, which, value, error in _metrics(whole):
        full_name = _full_name(metric, which)
        if full_name in first:
            measured = [
                part.scores[full_name] for part in parts.values() if full_name in part.scores
            ]
            items = tuple(item for score in measured for item in score.items)
            scores[full_name] = Score(value, error, first[full_name].higher_is_better, items)
    return TaskScores(scores, int(whole["sample_len"]), sum(part.cut for part in parts.values()))


def _metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float | None]]:
    """Yield metric, filter, value and standard error of the keys `metric,filter` of the harness."""
    for key, value in result.items():
        metric, comma, which = key.partition(",")
        if comma and not metric.endswith("_stderr") and _is_number(value):
            error: Any = result.get(f"{metric}_stderr,{which}")
            finite = error is not None and not isinstance(error, str) and math.isfinite(error)
            yield metric, which, float(value), float(error) if finite else None


def _full_name(metric: str, which: str) -> str:
    return metric if which == "none" else f"{metric},{which}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or getattr(value, "shape", None) == ()
