"""GLUE's nine tasks (Wang et al. 2019): their columns, their metrics, their splits by `datasets`.

DATA/sst2/train.jsonl, validation.jsonl     files (.jsonl, .csv, .parquet) in the hub's columns
DATA/sst2/dataset_dict.json, …              a directory that `save_to_disk` wrote
nyu-mll/glue                                the hub's name
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from data_pipeline.sources.hub import one_line
from pretrain.errors import UserError

TRAIN = "train"
MOST_SCORE = 5
"""Largest label of a task without classes."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Task:
    """A task of one or two sentences.

    Attributes:
        name: Name of the task on the hub.
        columns: Columns of the sentences.
        metrics: Metrics that GLUE reports, whose mean is the task's score.
        labels: Number of labels; 0 for a score in a range.
        validation: Splits that are reported, which count equally.
    """

    name: str
    columns: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    labels: int = 2
    validation: tuple[str, ...] = ("validation",)

    @property
    def reported(self) -> tuple[str, ...]:
        """Return the metrics that are reported: GLUE's, and accuracy and F1 of two labels."""
        return tuple(dict.fromkeys(self.metrics + (_ACCURACY_F1 if self.labels == 2 else ())))


_ACCURACY_F1 = ("accuracy", "f1")
_PAIR = ("sentence1", "sentence2")
_TASKS = (
    Task("cola", ("sentence",), ("matthews",)),
    Task("sst2", ("sentence",)),
    Task("mrpc", _PAIR, _ACCURACY_F1),
    Task("qqp", ("question1", "question2"), _ACCURACY_F1),
    Task("stsb", _PAIR, ("pearson", "spearman"), labels=0),
    Task(
        "mnli",
        ("premise", "hypothesis"),
        labels=3,
        validation=("validation_matched", "validation_mismatched"),
    ),
    Task("qnli", ("question", "sentence")),
    Task("rte", _PAIR),
    Task("wnli", _PAIR),
)
TASKS = {task.name: task for task in _TASKS}


def find_tasks(names: str, option: str) -> list[Task]:
    """Return the tasks of a list such as `sst2,CoLA`, by the hub's names.

    Raises:
        UserError: a name is none of them.
    """
    chosen = dict.fromkeys(name.strip().lower() for name in names.split(","))
    if unknown := [name for name in chosen if name not in TASKS]:
        raise UserError(f"{option}: there is no task '{unknown[0]}'; there are {', '.join(TASKS)}")
    return [TASKS[name] for name in chosen]


def read_task(task: Task, source: str) -> dict[str, Any]:
    """Read the splits that a fine-tuning needs.

    Args:
        source: Directory with the task's folder or files, or a name on the hub.

    Returns:
        {split: `datasets.Dataset`}.

    Raises:
        UserError: no such data or split, or a row that is not an example of the task.
    """
    import datasets

    datasets.disable_progress_bars()
    needed = (TRAIN, *task.validation)
    folder = next((path for path in (Path(source, task.name), Path(source)) if path.is_dir()), None)
    if folder is None and not HUB_NAME.fullmatch(source):
        raise UserError(f"--data {source} is not a directory, nor a name on the hub")
    try:
        if folder is None:
            splits = datasets.load_dataset(source, task.name)
        elif (folder / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(folder))
        else:
            files = {split: f"{split}[-.]*" for split in needed}
            there = {split: name for split, name in files.items() if any(folder.glob(name))}
            # Without `data_files` it would take files of every folder, those of other tasks too.
            splits = datasets.load_dataset(str(folder), data_files=there) if there else {}
    # `datasets` and the readers below it raise types of all kinds.
    except Exception as error:
        reason = one_line(error.__cause__ or error)[:500].rstrip(".")
        raise UserError(f"--data {source}: {task.name} cannot be read: {reason}") from error
    if missing := [split for split in needed if split not in splits]:
        raise UserError(
            f"--data {source}: {task.name} has no split {missing[0]}, such as {missing[0]}.jsonl; "
            f"it has {', '.join(splits) or 'none'}"
        )
    for split in needed:
        _check(task, splits[split], f"--data {source}: {task.name}, split {split}")
    return {split: splits[split] for split in needed}


def _check(task: Task, rows: Any, place: str) -> None:
    """Refuse rows without the task's columns, texts or labels."""
    if not len(rows):
        raise UserError(f"{place} has no rows")
    columns = (*task.columns, "label")
    if missing := [column for column in columns if column not in rows.column_names]:
        raise UserError(
            f"{place} has no column {missing[0]}; it has {', '.join(rows.column_names)}"
        )
    whole, largest = (1, task.labels - 1) if task.labels else (None, MOST_SCORE)
    label = Annotated[float, Field(ge=0, le=largest, multiple_of=whole)]
    texts: dict[str, TypeAdapter[Any]] = dict.fromkeys(task.columns, TypeAdapter(list[str]))
    forms = {**texts, "label": TypeAdapter(list[label])}
    for column, form in forms.items():
        try:
            form.validate_python(list(rows[column]), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{place}, row {int(first['loc'][0]) + 1}: {column} is {first['input']!r}: "
                f"{first['msg']}"
            ) from None


def measure(task: Task, labels: np.ndarray, outputs: np.ndarray) -> dict[str, float]:
    """Return metrics by name as GLUE defines them, and `score`, the mean of the task's own.

    1 is the best. An undefined correlation counts as 0.

    Args:
        labels: `[items]`.
        outputs: `[items, labels]` of a classifier, or `[items, 1]` of a regression.
    """
    from scipy import stats
    from sklearn import metrics

    predictions = outputs.argmax(axis=-1) if task.labels else outputs[:, 0]
    functions = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda ours, theirs: stats.pearsonr(ours, theirs).statistic,
        "spearman": lambda ours, theirs: stats.spearmanr(ours, theirs).statistic,
    }
    values = {
        name: float(np.nan_to_num(functions[name](labels, predictions))) for name in task.reported
    }
    return {**values, "score": sum(values[name] for name in task.metrics) / len(task.metrics)}
