"""Evaluation of models on tasks; results on disk are kept, others are measured and written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.io.forms import Count
from laboratory.evaluation.tasks.harness import Harness, LoadedTask, Measured
from laboratory.evaluation.tasks.scores import Score, TaskScores, group_scores
from laboratory.finetuning.models import Pretrained
from laboratory.reporting.progress import WorkDisplay
from laboratory.study.cache import ResultCache


class _Score(TypedDict):
    value: FiniteFloat | None
    stderr: FiniteFloat | None
    higher_is_better: bool
    items: list[FiniteFloat | None]


class _Result(TypedDict):
    scores: dict[str, _Score]
    items: Count
    cut: Count


_RESULT = TypeAdapter(_Result)


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation.

    Attributes:
        batch_size: Requests at once.
        device: cpu or cuda.
        limit: The first items of each task, at most; None: all.
        harness: Version of the harness.
        results: Directory for results, which are kept.
    """

    batch_size: int
    device: str
    limit: int | None
    harness: str
    results: Path


def measure(
    models: Sequence[Pretrained], measured: Sequence[Measured], settings: Settings
) -> dict[Path, dict[str, TaskScores]]:
    """Evaluate all models on all tasks and groups.

    Args:
        measured: Tasks and groups.

    Returns:
        {path of a model: {name: scores}}.

    Raises:
        UserError: a run cannot be exported, a model cannot be loaded, or a task fails on it.
        DataError: as `export_run`.
    """
    tasks = list({task.name: task for entry in measured for task in entry.tasks}.values())
    scores: dict[Path, dict[str, TaskScores]] = {}
    with WorkDisplay(len(models) * len(tasks)) as work:
        for model in models:
            parts = _measure_one(model, tasks, settings, work)
            scores[model.path] = {entry.name: _whole(entry, parts) for entry in measured}
    return scores


def _whole(entry: Measured, parts: Mapping[str, TaskScores]) -> TaskScores:
    if entry.group is None:
        return parts[entry.tasks[0].name]
    return group_scores(entry.group, {task.name: parts[task.name] for task in entry.tasks})


def _measure_one(
    model: Pretrained, tasks: Sequence[LoadedTask], settings: Settings, work: WorkDisplay
) -> dict[str, TaskScores]:
    directory = settings.results / f"{Path(model.name).name}-{model.digest[:12]}"
    cache = ResultCache(directory, _RESULT)
    harness: Harness | None = None

    def make(task: LoadedTask) -> dict[str, Any]:
        nonlocal harness
        # Loading a model takes long, and is not needed where all results are on disk.
        if harness is None:
            harness = Harness(model.directory, settings.device, settings.batch_size, model.trusted)
        started = time.monotonic()
        scores = harness.evaluate(task, settings.limit)
        return {
            **{"task": task.name, "version": task.version, "shots": task.shots},
            **{"step": model.step, "path": str(model.path), "device": settings.device},
            "seconds": round(time.monotonic() - started, 3),
            **asdict(scores),
        }

    scores = {}
    for task in tasks:
        work.begin(f"{model.name}: {task.name}")
        name = f"{task.name.replace('/', '_')}-{task.asked[:12]}"
        identity = {"model": model.digest, "asked": task.asked, "lm-eval": settings.harness}
        content, _ = cache.read_or_make(name, identity, partial(make, task))
        scores[task.name] = _scores(content)
    return scores


def _scores(content: Mapping[str, Any]) -> TaskScores:
    """Return the scores in a file, with null read as NaN."""
    scores = {}
    for metric, score in content["scores"].items():
        value, *items = (
            math.nan if number is None else float(number)
            for number in (score["value"], *score["items"])
        )
        scores[metric] = Score(value, score["stderr"], score["higher_is_better"], tuple(items))
    return TaskScores(scores, content["items"], content["cut"])
