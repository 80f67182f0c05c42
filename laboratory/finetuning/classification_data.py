"""GLUE's nine tasks (Wang et al. 2019), and examples of a task from files as they come.

DATA/sst2/train-00000-of-00001.parquet, validation-….parquet     the hub's nyu-mll/glue
DATA/sst2/train.jsonl, validation.jsonl                          your own, in the same columns
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laboratory.finetuning.records import SUFFIXES, Record, read_records
from pretrain.errors import UserError

TRAIN = "train"
VALIDATION = "validation"
MISMATCHED = "validation_mismatched"
_FILES = {
    TRAIN: ("train",),
    VALIDATION: ("validation", "validation_matched"),
    MISMATCHED: ("validation_mismatched",),
}
"""Names of the files of a split, without a part after a hyphen or a point."""


@dataclass(frozen=True)
class Task:
    """A task of one or two sentences.

    Attributes:
        name: Name of the task on the hub.
        labels: Names in the order of their numbers; empty for a score in a range.
        first: Column of the first sentence.
        metrics: Metrics that GLUE reports, whose mean is the task's score.
        second: Column of the second sentence; empty: there is none.
        scores: The range, where there are no labels.
    """

    name: str
    labels: tuple[str, ...]
    first: str
    metrics: tuple[str, ...]
    second: str = ""
    scores: tuple[float, float] = (0.0, 5.0)

    @property
    def outputs(self) -> int:
        """Return how many numbers the classifier gives for an example."""
        return len(self.labels) or 1


_ENTAILMENT = ("entailment", "not_entailment")
_ACCURACY = ("accuracy",)
_TASKS = (
    Task(
        name="cola",
        labels=("unacceptable", "acceptable"),
        first="sentence",
        metrics=("matthews",),
    ),
    Task(
        name="sst2",
        labels=("negative", "positive"),
        first="sentence",
        metrics=_ACCURACY,
    ),
    Task(
        name="mrpc",
        labels=("not_equivalent", "equivalent"),
        first="sentence1",
        second="sentence2",
        metrics=("accuracy", "f1"),
    ),
    Task(
        name="qqp",
        labels=("not_duplicate", "duplicate"),
        first="question1",
        second="question2",
        metrics=("accuracy", "f1"),
    ),
    Task(
        name="stsb",
        labels=(),
        first="sentence1",
        second="sentence2",
        metrics=("pearson", "spearman"),
    ),
    Task(
        name="mnli",
        labels=("entailment", "neutral", "contradiction"),
        first="premise",
        second="hypothesis",
        metrics=_ACCURACY,
    ),
    Task(
        name="qnli",
        labels=_ENTAILMENT,
        first="question",
        second="sentence",
        metrics=_ACCURACY,
    ),
    Task(
        name="rte",
        labels=_ENTAILMENT,
        first="sentence1",
        second="sentence2",
        metrics=_ACCURACY,
    ),
    Task(
        name="wnli",
        labels=_ENTAILMENT[::-1],
        first="sentence1",
        second="sentence2",
        metrics=_ACCURACY,
    ),
)
TASKS = {task.name: task for task in _TASKS}


@dataclass(frozen=True)
class Example:
    """Example of a task.

    Attributes:
        first: The first sentence.
        second: The second one; None: there is none.
        label: Number of the label, or the score.
    """

    first: str
    second: str | None
    label: int | float


@dataclass(frozen=True)
class TaskData:
    """Examples of a task.

    Attributes:
        train: Examples to train on.
        validation: Examples to report.
        mismatched: Examples of MNLI in other genres.
    """

    task: Task
    train: Sequence[Example]
    validation: Sequence[Example]
    mismatched: Sequence[Example] = ()


def find_tasks(names: str) -> list[Task]:
    """Return the tasks of a list such as `sst2,CoLA`, by the hub's names.

    Raises:
        UserError: a name is none of them, or is there twice.
    """
    tasks: list[Task] = []
    for name in names.split(","):
        task = TASKS.get(name.strip().lower())
        if task is None:
            raise UserError(
                f"--tasks: there is no task '{name.strip()}'; there are {', '.join(TASKS)}"
            )
        if task in tasks:
            raise UserError(f"--tasks names {task.name} twice")
        tasks.append(task)
    return tasks


def read_task(task: Task, data: Path) -> TaskData:
    """Read the examples of a task.

    Args:
        data: Directory with the task's folder, or that folder.

    Raises:
        UserError: no such folder, no file of a split or several kinds of them, or a row that is not
            an example.
    """
    folder = data if data.name == task.name else data / task.name
    if not folder.is_dir():
        raise UserError(
            f"--data {data} has no folder {task.name}: give the directory that holds it"
        )
    return TaskData(
        task,
        train=_read_split(task, folder, TRAIN),
        validation=_read_split(task, folder, VALIDATION),
        mismatched=_read_split(task, folder, MISMATCHED) if task.name == "mnli" else (),
    )


def read_examples(task: Task, paths: Sequence[Path]) -> list[Example]:
    """Read the examples of files, one after the other.

    Raises:
        UserError: a file cannot be read, or a row is not an example of the task.
    """
    examples = []
    for record in (record for path in paths for record in read_records(path)):
        second = record.text(task.second) if task.second else None
        examples.append(Example(record.text(task.first), second, _label(task, record)))
    if not examples:
        raise UserError(f"{', '.join(map(str, paths))}: there are no examples")
    return examples


def _read_split(task: Task, folder: Path, split: str) -> list[Example]:
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in SUFFIXES and path.name.split(".")[0].split("-")[0] in _FILES[split]
    ]
    if not files:
        names = " or ".join(_FILES[split])
        raise UserError(f"{folder} has no file {names} that ends in {', '.join(SUFFIXES)}")
    if len({(path.suffix, path.name.split(".")[0].split("-")[0]) for path in files}) > 1:
        raise UserError(
            f"{folder} has {files[0].name} and {files[-1].name} for one split; leave one out"
        )
    return read_examples(task, files)


def _label(task: Task, record: Record) -> int | float:
    value = record.value("label")
    if not task.labels:
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        low, high = task.scores
        if not low <= score <= high:
            raise UserError(
                f"{record.origin}: the label of {task.name} is '{value}', not {low:g} to {high:g}"
            )
        return score
    if value in task.labels:
        return task.labels.index(value)
    numbers = [str(number) for number in range(len(task.labels))]
    if isinstance(value, bool) or str(value) not in numbers:
        labels = ", ".join(f"{number} ({name})" for number, name in enumerate(task.labels))
        raise UserError(
            f"{record.origin}: '{value}' is not a label of {task.name}; these are {labels}"
        )
    return int(value)
