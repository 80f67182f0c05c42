"""Examples of GLUE's tasks from files of both kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from laboratory.finetuning.classification_data import (
    TASKS,
    Example,
    find_tasks,
    read_examples,
    read_task,
)
from laboratory.finetuning.encoding import encode_examples, set_aside, shorten
from pretrain.errors import UserError

EXAMPLES = {
    "cola": ({"sentence": 'He said "no.', "label": 0}, Example('He said "no.', None, 0)),
    "sst2": ({"sentence": "a joy ", "label": 1}, Example("a joy ", None, 1)),
    "mrpc": (
        {"sentence1": "He went.", "sentence2": "He left.", "label": 1},
        Example("He went.", "He left.", 1),
    ),
    "qqp": ({"question1": "Why?", "question2": "How?", "label": 0}, Example("Why?", "How?", 0)),
    "stsb": (
        {"sentence1": "A plane.", "sentence2": "A jet.", "label": 4.25},
        Example("A plane.", "A jet.", 4.25),
    ),
    "mnli": (
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment"},
        Example("It rains.", "It is wet.", 0),
    ),
    "qnli": (
        {"question": "Who?", "sentence": "He did.", "label": "not_entailment"},
        Example("Who?", "He did.", 1),
    ),
    "rte": ({"sentence1": "A.", "sentence2": "B.", "label": 0}, Example("A.", "B.", 0)),
    "wnli": ({"sentence1": "A.", "sentence2": "B.", "label": "1"}, Example("A.", "B.", 1)),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_hub_and_own_files_give_the_same_examples(name: str, tmp_path: Path) -> None:
    task, (fields, example) = TASKS[name], EXAMPLES[name]
    hub, own = (tmp_path / part for part in ("hub", "own"))
    for folder in (hub / task.name, own / task.name):
        folder.mkdir(parents=True)
    splits = ["train", "validation", *["validation_mismatched"] * (name == "mnli")]
    for split in splits:
        lines = json.dumps(fields) + "\n\n" + json.dumps(fields)
        (own / task.name / f"{split}.jsonl").write_text(lines)
        place = split + "_matched" * (name == "mnli" and split == "validation")
        table = pyarrow.Table.from_pylist([fields] * 2)
        parquet.write_table(table, hub / task.name / f"{place}-00000-of-00001.parquet")
    for data in (hub, own, own / task.name):
        found = read_task(task, data)
        assert found.train == found.validation == [example] * 2
        assert found.mismatched == ([example] * 2 if name == "mnli" else ())


def test_both_validation_sets_of_mnli(tmp_path: Path) -> None:
    folder = tmp_path / "mnli"
    folder.mkdir()
    row = json.dumps(EXAMPLES["mnli"][0]) + "\n"
    names = ("train", "validation_matched", "validation_mismatched")
    for number, name in enumerate(names, start=1):
        (folder / f"{name}.jsonl").write_text(row * number)
    (folder / "test_matched.jsonl").write_text("of no use here")
    found = read_task(TASKS["mnli"], tmp_path)
    assert [len(split) for split in (found.train, found.validation, found.mismatched)] == [1, 2, 3]
    (folder / "validation_mismatched.jsonl").unlink()
    with pytest.raises(UserError, match=r"mnli has no file validation_mismatched that ends in "):
        read_task(TASKS["mnli"], tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "x.jsonl",
            '{"sentence": "a", "label": 2}\n',
            r"'2' is not a label of sst2; these are 0 \(neg",
        ),
        ("x.jsonl", '{"sentence": "a", "mark": 1}\n', "line 1 has no label; it has sentence, mark"),
        ("x.jsonl", "\n", "there are no examples"),
        (
            "x.jsonl",
            '{"sentence": "a", "label": 1}\n{"sentence": 3, "label": 1}\n',
            "line 2: .* is not text",
        ),
        ("x.jsonl", '{"sentence": "a", "label": true}\n', "'True' is not a label"),
        ("x.jsonl", '{"sentence": "a", "label": -1}\n', "'-1' is not a label of sst2"),
        ("x.jsonl", '{"sentence"\n', "line 1 is not JSON"),
        ("x.jsonl", '{"sentence": ' + "[" * 10**5, r"line 1 is not JSON \(it nests too deeply\)"),
        (
            "x.jsonl",
            '{"sentence": "\\ud800", "label": 1}',
            r"sentence is '\\ud800', which is not te",
        ),
        ("x.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("x.parquet", "no parquet", "cannot be read as parquet"),
        ("x.csv", "a,1", "give a file that ends in .jsonl, .parquet"),
    ],
)
def test_a_bad_row_is_named(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        read_examples(TASKS["sst2"], [tmp_path / name])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"sentence": "\xff", "label": 1}\n')
    with pytest.raises(UserError, match=r"x.jsonl is not UTF-8"):
        read_examples(TASKS["sst2"], [tmp_path / "x.jsonl"])
    with pytest.raises(UserError, match=r"none.jsonl cannot be read: No such file"):
        read_examples(TASKS["sst2"], [tmp_path / "none.jsonl"])
    (tmp_path / "score.jsonl").write_text(json.dumps(EXAMPLES["stsb"][0] | {"label": 6}))
    with pytest.raises(UserError, match=r"line 1: the label of stsb is '6', not 0 to 5"):
        read_examples(TASKS["stsb"], [tmp_path / "score.jsonl"])


def test_folders_and_tasks_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no task 'squad'; there are cola, sst2"):
        find_tasks("sst2,squad")
    with pytest.raises(UserError, match="--tasks names sst2 twice"):
        find_tasks("sst2, SST2")
    assert [task.name for task in find_tasks("CoLA,stsb")] == ["cola", "stsb"]
    with pytest.raises(UserError, match="has no folder sst2"):
        read_task(TASKS["sst2"], tmp_path)
    folder = tmp_path / "sst2"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"sentence": "a", "label": 1}')
    with pytest.raises(UserError, match="sst2 has no file validation"):
        read_task(TASKS["sst2"], tmp_path)
    (folder / "train.parquet").write_text("")
    with pytest.raises(UserError, match=r"train.jsonl and train.parquet for one split"):
        read_task(TASKS["sst2"], tmp_path)


def test_pairs_are_cut_where_they_are_longer() -> None:
    assert shorten([[1] * 9, [2] * 3], 8) == [[1] * 5, [2] * 3]
    assert shorten([[1] * 9, [2] * 7], 8) == [[1] * 4, [2] * 4]
    assert shorten([[1] * 3], 8) == [[1] * 3]
    words = {"a b c d": [5, 6, 7, 8], "e": [9], "\n": [1]}
    found = encode_examples(
        TASKS["rte"],
        [Example("a b c d", "e", 1)],
        lambda texts: [words[text] for text in texts],
        start=2,
        longest=6,
    )
    assert found.shortened == 1 and found.items[0] == {"input_ids": [2, 5, 6, 7, 1, 9], "labels": 1}


def test_what_is_set_aside_is_drawn_by_the_seed() -> None:
    kept, aside = set_aside(range(100), 0.1, 1000, seed=1)
    assert len(aside) == 10 and sorted([*kept, *aside]) == list(range(100)) and kept == sorted(kept)
    assert set_aside(range(100), 0.1, 1000, seed=1)[1] == aside
    assert set_aside(range(100), 0.1, 1000, seed=2)[1] != aside
    assert len(set_aside(range(100), 0.1, 3, seed=1)[1]) == 3
    with pytest.raises(UserError, match="1 training examples are too few"):
        set_aside(range(1), 0.1, 3, seed=1)
