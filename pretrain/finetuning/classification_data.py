"""GLUE's nine tasks (Wang et al. 2019), and examples of a task from files as they come.

DATA/SST-2/train.tsv, dev.tsv                                    GLUE's own archives
DATA/sst2/train-00000-of-00001.parquet, validation-….parquet     the hub's nyu-mll/glue
DATA/sst2/train.jsonl, validation.jsonl                          your own, in the columns of either
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import UserError
from pretrain.finetuning.records import SUFFIXES, Record, read_records

TRAIN = "train"
VALIDATION = "validation"
MISMATCHED = "validation_mismatched"
_FILES = {
    TRAIN: ("train",),
    VALIDATION: ("validation", "dev", "validation_matched", "dev_matched"),
    MISMATCHED: ("validation_mismatched", "dev_mismatched"),
}
"""Names of the files of a split, without a part after a hyphen or a point."""


@dataclass(frozen=True)
class Task:
    """A task of one or two sentences.

    Attributes:
        name: as on the hub.
        folder: as in GLUE's archives.
        labels: names in the order of their numbers; empty for a score in a range.
        first: columns of the first sentence, by all the names they go by.
        metrics: what GLUE reports, whose mean is the task's score.
        second: the same of the second sentence; empty: there is none.
        label: the same of the label.
        headless: columns of its TSV files, where these have no header.
        scores: the range, where there are no labels.
    """

    name: str
    folder: str
    labels: tuple[str, ...]
    first: tuple[str, ...]
    metrics: tuple[str, ...]
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    headless: tuple[str, ...] = ()
    scores: tuple[float, float] = (0.0, 5.0)

    @property
    def outputs(self) -> int:
        """Return how many numbers the classifier gives for an example."""
        return len(self.labels) or 1

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.first, *self.second, *self.label)


_ENTAILMENT = ("entailment", "not_entailment")
_FIRST = ("sentence1", "#1 String")
_SECOND = ("sentence2", "#2 String")
_ACCURACY = ("accuracy",)
_TASKS = (
    Task(
        name="cola",
        folder="CoLA",
        labels=("unacceptable", "acceptable"),
        first=("sentence",),
        metrics=("matthews",),
        headless=("source", "label", "mark", "sentence"),
    ),
    Task(
        name="sst2",
        folder="SST-2",
        labels=("negative", "positive"),
        first=("sentence",),
        metrics=_ACCURACY,
    ),
    Task(
        name="mrpc",
        folder="MRPC",
        labels=("not_equivalent", "equivalent"),
        first=_FIRST,
        second=_SECOND,
        label=("label", "Quality"),
        metrics=("accuracy", "f1"),
    ),
    Task(
        name="qqp",
        folder="QQP",
        labels=("not_duplicate", "duplicate"),
        first=("question1",),
        second=("question2",),
        label=("label", "is_duplicate"),
        metrics=("accuracy", "f1"),
    ),
    Task(
        name="stsb",
        folder="STS-B",
        labels=(),
        first=_FIRST,
        second=_SECOND,
        label=("label", "score"),
        metrics=("pearson", "spearman"),
    ),
    Task(
        name="mnli",
        folder="MNLI",
        labels=("entailment", "neutral", "contradiction"),
        first=("premise", "sentence1"),
        second=("hypothesis", "sentence2"),
        label=("label", "gold_label"),
        metrics=_ACCURACY,
    ),
    Task(
        name="qnli",
        folder="QNLI",
        labels=_ENTAILMENT,
        first=("question",),
        second=("sentence",),
        metrics=_ACCURACY,
    ),
    Task(
        name="rte",
        folder="RTE",
        labels=_ENTAILMENT,
        first=_FIRST,
        second=_SECOND,
        metrics=_ACCURACY,
    ),
    Task(
        name="wnli",
        folder="WNLI",
        labels=_ENTAILMENT[::-1],
        first=_FIRST,
        second=_SECOND,
        metrics=_ACCURACY,
    ),
)
TASKS = {task.name: task for task in _TASKS}


@dataclass(frozen=True)
class Example:
    """Example of a task.

    Attributes:
        first: the first sentence.
        second: the second one; None: there is none.
        label: number of the label, or the score.
    """

    first: str
    second: str | None
    label: int | float


@dataclass(frozen=True)
class TaskData:
    """Examples of a task.

    Attributes:
        task: the task.
        train: to train on.
        validation: to report.
        mismatched: MNLI's of other genres, where they are given.
    """

    task: Task
    train: Sequence[Example]
    validation: Sequence[Example]
    mismatched: Sequence[Example] = ()


def find_tasks(names: str) -> list[Task]:
    """Return the tasks of a list such as `sst2,CoLA`, by the hub's names or the archives'.

    Raises:
        UserError: a name is none of them, or is there twice.
    """
    known = {key.lower(): task for task in TASKS.values() for key in (task.name, task.folder)}
    tasks: list[Task] = []
    for name in names.split(","):
        task = known.get(name.strip().lower())
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
        task: the task.
        data: directory with the task's folder, or that folder.

    Raises:
        UserError: no such folder, no file of a split or several kinds of them, or a row that is not
            an example.
    """
    folders = [data / name for name in (task.folder, task.name) if (data / name).is_dir()]
    if not folders and data.name in (task.folder, task.name) and data.is_dir():
        folders = [data]
    if not folders:
        raise UserError(
            f"--data {data} has no folder {task.folder} or {task.name}: give the directory that "
            "holds it"
        )
    train, validation = (
        _read_split(task, folders[0], split, required=True) for split in (TRAIN, VALIDATION)
    )
    return TaskData(
        task, train, validation, _read_split(task, folders[0], MISMATCHED, required=False)
    )


def read_examples(task: Task, paths: Sequence[Path]) -> list[Example]:
    """Read the examples of files, one after the other.

    Args:
        task: the task.
        paths: its files.

    Raises:
        UserError: a file cannot be read, or a row is not an example of the task.
    """
    examples = []
    for record in (r for path in paths for r in read_records(path, task.columns, task.headless)):
        second = record.text(task.second) if task.second else None
        examples.append(Example(record.text(task.first), second, _label(task, record)))
    if not examples:
        raise UserError(f"{', '.join(map(str, paths))}: there are no examples")
    return examples


def _read_split(task: Task, folder: Path, split: str, *, required: bool) -> list[Example]:
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in SUFFIXES and path.name.split(".")[0].split("-")[0] in _FILES[split]
    ]
    if not files:
        if required:
            names = " or ".join(_FILES[split])
            raise UserError(f"{folder} has no file {names} that ends in {', '.join(SUFFIXES)}")
        return []
    if len({(path.suffix, path.name.split(".")[0].split("-")[0]) for path in files}) > 1:
        raise UserError(
            f"{folder} has {files[0].name} and {files[-1].name} for one split; leave one out"
        )
    return read_examples(task, files)


def _label(task: Task, record: Record) -> int | float:
    value = record.value(task.label)
    if not task.labels:
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        low, high = task.scores
        if not low <= score <= high:
            raise UserError(
                f"{record.place}: the label of {task.name} is '{value}', not {low:g} to {high:g}"
            )
        return score
    if value in task.labels:
        return task.labels.index(value)
    numbers = [str(number) for number in range(len(task.labels))]
    if isinstance(value, bool) or str(value) not in numbers:
        known = ", ".join(f"{number} ({name})" for number, name in enumerate(task.labels))
        raise UserError(
            f"{record.place}: '{value}' is not a label of {task.name}; these are {known}"
        )
    return int(value)
