"""GLUE's tasks: splits from files, from `save_to_disk`; metrics; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets

from laboratory.finetuning.glue_data import TASKS, find_tasks, measure, read_task
from pretrain.errors import UserError
from tests.laboratory.evaluation.tiny_models import own_cache

ROWS = [{"sentence": f"a {'good' if i % 2 else 'bad'} film", "label": i % 2} for i in range(6)]
SST2 = TASKS["sst2"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Any:
    with own_cache(tmp_path / "cache"):
        yield


def write(folder: Path, rows: list[dict[str, Any]] = ROWS, kind: str = "jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    for split in ("train", "validation"):
        path = str(folder / f"{split}.{kind}")
        {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[kind](path)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_files_of_every_kind_give_the_same_rows(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "glue/sst2", kind=kind)
    for source in (tmp_path / "glue", tmp_path / "glue/sst2"):
        splits = read_task(SST2, str(source))
        assert list(splits) == ["train", "validation"]
        assert splits["validation"].to_list() == ROWS


def test_a_directory_of_save_to_disk_is_read(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    saved = datasets.DatasetDict(train=table, validation=table, test=table)
    saved.save_to_disk(tmp_path / "saved")
    assert read_task(SST2, str(tmp_path / "saved"))["train"].to_list() == ROWS


def refused(match: str, source: Path, task: str = "sst2") -> None:
    with pytest.raises(UserError, match=match):
        read_task(TASKS[task], str(source))


def test_what_is_not_the_task_s_data_is_one_sentence(tmp_path: Path) -> None:
    refused("is not a directory, nor a name on the hub", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    refused("sst2 has no split train, such as train.jsonl; it has none", tmp_path / "empty")
    write(tmp_path / "glue/mrpc")
    refused("sst2 has no split train, such as train.jsonl; it has none", tmp_path / "glue")
    folder = write(tmp_path / "data")
    refused("rte, split train has no column sentence1; it has sentence, label", folder, "rte")
    refused("mnli has no split validation_matched, .*; it has train", folder, "mnli")
    write(tmp_path / "labels", [*ROWS, {"sentence": "more", "label": 2}])
    refused(r"row 7: label is 2: Input should be less than or equal to 1", tmp_path / "labels")
    write(tmp_path / "halves", [*ROWS, {"sentence": "more", "label": 0.5}])
    refused(r"row 7: label is 0.5: Input should be a multiple of 1", tmp_path / "halves")
    write(tmp_path / "texts", [{"sentence": 3, "label": 1}])
    refused(r"row 1: sentence is 3: Input should be a valid string", tmp_path / "texts")
    (folder / "train.jsonl").write_text('{"sentence": \n')
    refused("sst2 cannot be read: JSON parse error", folder)
    (folder / "train.jsonl").write_text("[1, 2]\n")
    refused("sst2 (cannot be read|, split train)", folder)
    (folder / "train.jsonl").unlink()
    refused("sst2 has no split train, .*; it has validation", folder)
    (folder / "train.csv").write_text("sentence,label\n")
    refused("sst2 cannot be read: Couldn't infer the same data file format for all", folder)
    for score in (5.5, "4", None):
        row = {"sentence1": "a", "sentence2": "b", "label": score}
        write(tmp_path / "scores", [{**row, "label": 5.0}, row] if score != "4" else [row])
        refused("label is .*: Input should be (less|a valid number)", tmp_path / "scores", "stsb")


def test_tasks_are_named_as_on_the_hub() -> None:
    assert [task.name for task in find_tasks("sst2, CoLA,sst2", "--tasks")] == ["sst2", "cola"]
    with pytest.raises(UserError, match="--task: there is no task 'sst3'; there are cola, sst2"):
        find_tasks("sst3", "--task")


def test_metrics_are_glue_s() -> None:
    labels = np.array([1, 1, 0, 0, 1])
    outputs = np.array([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]], float)  # 1 0 1 0 1
    # true positives 2, false ones 1, false negatives 1, true negatives 1
    matthews = (2 * 1 - 1 * 1) / (3 * 3 * 2 * 2) ** 0.5
    of_two = {"accuracy": 3 / 5, "f1": 2 / 3}
    expected = of_two | {"matthews": matthews, "score": matthews}
    assert measure(TASKS["cola"], labels, outputs) == pytest.approx(expected)
    expected = of_two | {"score": (3 / 5 + 2 / 3) / 2}
    assert measure(TASKS["mrpc"], labels, outputs) == pytest.approx(expected)
    scores = np.array([0.0, 1.0, 4.0])
    pearson = np.corrcoef(scores, [1, 2, 9])[0, 1]
    expected = {"pearson": pearson, "spearman": 1.0, "score": (pearson + 1) / 2}
    outputs = np.array([[1.0], [2.0], [9.0]])
    assert measure(TASKS["stsb"], scores, outputs) == pytest.approx(expected)
    outputs = np.array([[0.1, 0.2, 0.7], [0.9, 0.0, 0.1]])
    assert measure(TASKS["mnli"], np.array([2, 1]), outputs) == {"accuracy": 0.5, "score": 0.5}
