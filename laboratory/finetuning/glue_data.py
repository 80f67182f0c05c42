"""GLUE's nine tasks (Wang et al. 2019): their columns, their metrics, their splits by `datasets`.

DATA/sst2/train.jsonl, validation.jsonl     files (.jsonl, .csv, .parquet) in the hub's columns
DATA/sst2/dataset_dict.json, …              a directory that `save_to_disk` wrote
nyu-mll/glue                                the hub's name
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import UserError

TRAIN = "train"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_KINDS = {".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""{ending of a file: its kind in `datasets`}"""


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


_PAIR = ("sentence1", "sentence2")
_ACCURACY_F1 = ("accuracy", "f1")
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


def find_tasks(names: str, option: str = "--tasks") -> list[Task]:
    """Return the tasks of a list such as `sst2,CoLA`, by the hub's names.

    Raises:
        UserError: a name is none of them, or is there twice.
    """
    tasks: list[Task] = []
    for name in names.split(","):
        task = TASKS.get(name.strip().lower())
        if task is None:
            raise UserError(
                f"{option}: there is no task '{name.strip()}'; there are {', '.join(TASKS)}"
            )
        if task in tasks:
            raise UserError(f"{option} names {task.name} twice")
        tasks.append(task)
    return tasks


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
    folder = next((path for path in (Path(source, task.name), Path(source)) if path.is_dir()), None)
    if folder is None and not HUB_NAME.fullmatch(source):
        raise UserError(f"--data {source} is not a directory, nor a name on the hub")
    try:
        if folder is None:
            splits = datasets.load_dataset(source, task.name)
        elif (folder / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(folder))
        else:
            splits = _load_files(folder)
        missing = [split for split in (TRAIN, *task.validation) if split not in splits]
        if missing:
            raise UserError(
                f"--data {source}: {task.name} has no split {missing[0]}; it has "
                f"{', '.join(splits)}"
            )
        needed = {split: splits[split] for split in (TRAIN, *task.validation)}
        for split, rows in needed.items():
            _check(task, rows, f"--data {source}: {task.name}, split {split}")
    except UserError:
        raise
    except Exception as error:  # `datasets` and the readers below it raise types of all kinds
        reason = " ".join(str(error).split())[:500].rstrip(".")
        raise UserError(f"--data {source}: {task.name} cannot be read: {reason}") from error
    return needed


def _load_files(folder: Path) -> Any:
    """Load files named by their split, such as train.jsonl or train-00000-of-00001.parquet."""
    import datasets

    files = defaultdict(list)
    for path in sorted(folder.iterdir()):
        if path.suffix in _KINDS:
            files[path.name.split(".")[0].split("-")[0]].append(str(path))
    kinds = {Path(path).suffix for paths in files.values() for path in paths}
    if len(kinds) != 1:
        problem = f"files of several kinds ({', '.join(sorted(kinds))})" if kinds else "no files"
        raise UserError(
            f"--data: {folder} has {problem}; give train and validation as "
            f"{', '.join(_KINDS)}, or a directory that save_to_disk wrote"
        )
    return datasets.load_dataset(_KINDS[kinds.pop()], data_files=dict(files))


def _check(task: Task, rows: Any, place: str) -> None:
    """Refuse rows without the task's columns, texts or labels."""
    if not len(rows):
        raise UserError(f"{place} has no rows")
    for column in (*task.columns, "label"):
        if column not in rows.column_names:
            raise UserError(
                f"{place} has no column {column}; it has {', '.join(rows.column_names)}"
            )
    for column in task.columns:
        values = rows[column]
        for number, value in enumerate(values, start=1):
            if not isinstance(value, str):
                raise UserError(f"{place}, row {number}: {column} is {value!r}, which is not text")
    for number, value in enumerate(rows["label"], start=1):
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        valid = 0 <= value <= 5 if numeric and not task.labels else value in range(task.labels)
        if not (numeric and valid):
            allowed = f"a number from 0 to {task.labels - 1}" if task.labels else "0 to 5"
            raise UserError(f"{place}, row {number}: label is {value!r}, which is not {allowed}")


def measure(metrics: Sequence[str], labels: np.ndarray, outputs: np.ndarray) -> dict[str, float]:
    """Return metrics by name as GLUE defines them; 1 is the best.

    An undefined correlation counts as 0.

    Args:
        labels: `[items]`.
        outputs: `[items, labels]` of a classifier, or `[items, 1]` of a regression.
    """
    from scipy import stats
    from sklearn import metrics as learned

    predictions = outputs.argmax(axis=-1) if outputs.shape[-1] > 1 else outputs[:, 0]
    functions = {
        "accuracy": learned.accuracy_score,
        "f1": learned.f1_score,
        "matthews": learned.matthews_corrcoef,
        "pearson": lambda ours, theirs: stats.pearsonr(ours, theirs).statistic,
        "spearman": lambda ours, theirs: stats.spearmanr(ours, theirs).statistic,
    }
    values = {name: functions[name](labels, predictions) for name in metrics}
    return {name: float(np.nan_to_num(value)) for name, value in values.items()}
