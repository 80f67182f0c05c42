"""Models on tasks: what is there already is kept, the rest is evaluated and kept at once."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.evaluation.tasks.harness import Harness, LoadedTask, Measured
from pretrain.evaluation.tasks.models import Subject, fingerprint, model_directory
from pretrain.evaluation.tasks.scores import Score, TaskScores, group_scores
from pretrain.reporting.content import strict_json
from pretrain.reporting.progress import WorkDisplay
from pretrain.runs.directory import write_json


@dataclass(frozen=True)
class Settings:
    """How a model is evaluated. `limit`: items of each task, the first so many; None: all."""

    batch_size: int
    device: str
    limit: int | None
    trust_code: bool


@dataclass(frozen=True)
class Store:
    """Results below `directory`, one file for each model and task.

    A result counts for the same weights, tokenizer and code of the model, the same requests and way of
    scoring them, and the same version of the harness: `identity` says these three.
    """

    directory: Path
    harness: str

    def _path(self, model: str, name: str, task: LoadedTask) -> Path:
        place = f"{Path(name).name}-{model[:12]}"
        return self.directory / place / f"{task.name.replace('/', '_')}-{task.asked[:12]}.json"

    def _identity(self, model: str, task: LoadedTask) -> dict[str, str]:
        return {"model": model, "asked": task.asked, "lm-eval": self.harness}

    def read(self, model: str, name: str, task: LoadedTask) -> TaskScores | None:
        """What is kept of this model on this task; None where nothing is, or nothing whole."""
        try:
            content = json.loads(self._path(model, name, task).read_text(encoding="utf-8"))
            if content["identity"] != self._identity(model, task):
                return None
            scores = {metric: _score(values) for metric, values in content["scores"].items()}
            return TaskScores(scores, int(content["items"]), int(content["cut"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(
        self, model: str, name: str, task: LoadedTask, found: TaskScores, facts: Mapping[str, Any]
    ) -> None:
        """Keep it, with `facts` for people beside it."""
        content = {
            "identity": self._identity(model, task),
            "task": task.name,
            "version": task.version,
            "shots": task.shots,
            **facts,
            **asdict(found),
        }
        write_json(self._path(model, name, task), strict_json(content))


def _score(values: Mapping[str, Any]) -> Score:
    value = values["value"]
    return Score(
        float("nan") if value is None else float(value),
        values["stderr"],
        bool(values["higher_is_better"]),
        tuple(float("nan") if item is None else item for item in values["items"]),
    )


def measure(
    subjects: Sequence[Subject], measured: Sequence[Measured], settings: Settings, store: Store
) -> dict[Path, dict[str, TaskScores]]:
    """{path of a subject: {name: scores}} of everything.

    Raises:
        UserError: a run cannot be exported, a model not be loaded, or a task fails on it.
        DataError: as `export_run`.
    """
    tasks = list({task.name: task for one in measured for task in one.tasks}.values())
    found: dict[Path, dict[str, TaskScores]] = {}
    with WorkDisplay(len(subjects) * len(tasks)) as work:
        for subject in subjects:
            parts = _measure_one(subject, tasks, settings, store, work)
            found[subject.path] = {
                one.name: _whole(one, {task.name: parts[task.name] for task in one.tasks}) for one in measured
            }
    return found


def _measure_one(
    subject: Subject, tasks: Sequence[LoadedTask], settings: Settings, store: Store, work: WorkDisplay
) -> dict[str, TaskScores]:
    directory = model_directory(subject)
    model = fingerprint(directory)
    harness: Harness | None = None
    found = {}
    for task in tasks:
        work.begin(f"{subject.name}: {task.name}")
        scores = store.read(model, subject.name, task)
        if scores is None:
            if harness is None:
                trusted = settings.trust_code or subject.is_run  # a run's code is our own
                harness = Harness(directory, settings.device, settings.batch_size, trusted)
            started = time.monotonic()
            scores = harness.evaluate(task, settings.limit)
            facts = {
                "step": subject.step,
                "path": str(subject.path),
                "device": settings.device,
                "seconds": round(time.monotonic() - started, 3),
            }
            store.write(model, subject.name, task, scores, facts)
        found[task.name] = scores
    return found


def _whole(one: Measured, parts: Mapping[str, TaskScores]) -> TaskScores:
    return parts[one.tasks[0].name] if one.group is None else group_scores(one.group, parts)
