"""Examples of GLUE's tasks from files in all the layouts they come in."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from pretrain.errors import UserError
from pretrain.finetuning.classification_data import (
    TASKS,
    Example,
    find_tasks,
    read_examples,
    read_task,
)
from pretrain.finetuning.encoding import encode_examples, set_aside, shorten

# Header and a row of each archive of GLUE, as its files are; CoLA's have no header.
ARCHIVES = {
    "cola": ("", 'gj04\t0\t*\tHe said "no.\n', Example('He said "no.', None, 0)),
    "sst2": ("sentence\tlabel\n", "a joy \t1\n", Example("a joy ", None, 1)),
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
        "1\t70\t71\tHe went.\tHe left.\n",
        Example("He went.", "He left.", 1),
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n",
        "7\t1\t2\tWhy?\tHow?\t0\n",
        Example("Why?", "How?", 0),
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n",
        "0\tmain\tMSR\t2012\t1\tnone\tnone\tA plane.\tA jet.\t4.250\n",
        Example("A plane.", "A jet.", 4.25),
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n",
        "0\t1\t2\tfiction\t( x )\t( y )\tIt rains.\tIt is wet.\tneutral\tentailment\n",
        Example("It rains.", "It is wet.", 0),
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n",
        "0\tWho?\tHe did.\tnot_entailment\n",
        Example("Who?", "He did.", 1),
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel\n",
        "0\tA.\tB.\tentailment\n",
        Example("A.", "B.", 0),
    ),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n", "0\tA.\tB.\t1\n", Example("A.", "B.", 1)),
}


@pytest.mark.parametrize("name", TASKS)
def test_archives_the_hub_and_own_files_give_the_same_examples(name: str, tmp_path: Path) -> None:
    task, (header, row, example) = TASKS[name], ARCHIVES[name]
    archive, hub, own = (tmp_path / part for part in ("archive", "hub", "own"))
    for folder in (archive / task.folder, hub / task.name, own / task.name):
        folder.mkdir(parents=True)
    names = {"train": "train", "validation": "dev_matched" if name == "mnli" else "dev"}
    fields = {task.first[0]: example.first, "label": example.label}
    if example.second is not None:
        fields[task.second[0]] = example.second
    for split, file in names.items():
        (archive / task.folder / f"{file}.tsv").write_text(header + row * 2)
        (own / task.name / f"{split}.jsonl").write_text(
            json.dumps(fields) + "\n\n" + json.dumps(fields)
        )
        place = split + "_matched" * (name == "mnli" and split == "validation")
        table = pyarrow.Table.from_pylist([fields] * 2)
        parquet.write_table(table, hub / task.name / f"{place}-00000-of-00001.parquet")
    for data in (archive, hub, own, own / task.name):
        found = read_task(task, data)
        assert found.train == found.validation == [example] * 2 and not found.mismatched


def test_both_validation_sets_of_mnli(tmp_path: Path) -> None:
    folder = tmp_path / "MNLI"
    folder.mkdir()
    header, row, _ = ARCHIVES["mnli"]
    for number, name in enumerate(("train", "dev_matched", "dev_mismatched"), start=1):
        (folder / f"{name}.tsv").write_text(header + row * number)
    (folder / "test_matched.tsv").write_text("of no use here")
    found = read_task(TASKS["mnli"], tmp_path)
    assert [len(split) for split in (found.train, found.validation, found.mismatched)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.tsv", "sentence\tlabel\na\t1\nb\n", "x.tsv, line 3 has 1 fields between tabs where 2"),
        ("x.tsv", "sentence\tlabel\na\t2\n", r"'2' is not a label of sst2; these are 0 \(neg"),
        ("x.tsv", "text\tclass\na\t1\n", r"line 1: the header names none of sentence, label"),
        ("x.tsv", "sentence\tmark\na\t1\n", r"line 2 has no label; it has sentence, mark"),
        ("x.tsv", "sentence\tlabel\n", r"there are no examples"),
        (
            "x.jsonl",
            '{"sentence": "a", "label": 1}\n{"sentence": 3, "label": 1}\n',
            "line 2: .* is not text",
        ),
        ("x.jsonl", '{"sentence": "a", "label": true}\n', "'True' is not a label"),
        ("x.jsonl", '{"sentence": "a", "label": -1}\n', "'-1' is not a label of sst2"),
        ("x.jsonl", '{"sentence"\n', "line 1 is not JSON"),
        ("x.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("x.parquet", "no parquet", "cannot be read as parquet"),
        ("x.csv", "a,1", "give a file that ends in .tsv, .jsonl, .parquet"),
    ],
)
def test_a_bad_row_is_named(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        read_examples(TASKS["sst2"], [tmp_path / name])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_bytes(b"sentence\tlabel\n\xff\t1\n")
    with pytest.raises(UserError, match=r"x.tsv is not UTF-8"):
        read_examples(TASKS["sst2"], [tmp_path / "x.tsv"])
    with pytest.raises(UserError, match=r"none.tsv cannot be read: No such file"):
        read_examples(TASKS["sst2"], [tmp_path / "none.tsv"])
    (tmp_path / "score.tsv").write_text(
        ARCHIVES["stsb"][0] + ARCHIVES["stsb"][1].replace("4.250", "6")
    )
    with pytest.raises(UserError, match=r"line 2: the label of stsb is '6', not 0 to 5"):
        read_examples(TASKS["stsb"], [tmp_path / "score.tsv"])


def test_folders_and_tasks_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no task 'squad'; there are cola, sst2"):
        find_tasks("sst2,squad")
    with pytest.raises(UserError, match="--tasks names sst2 twice"):
        find_tasks("sst2, SST-2")
    assert [task.name for task in find_tasks("CoLA,sts-b")] == ["cola", "stsb"]
    with pytest.raises(UserError, match="has no folder SST-2 or sst2"):
        read_task(TASKS["sst2"], tmp_path)
    folder = tmp_path / "sst2"
    folder.mkdir()
    (folder / "train.tsv").write_text("sentence\tlabel\na\t1\n")
    with pytest.raises(UserError, match="sst2 has no file validation or dev"):
        read_task(TASKS["sst2"], tmp_path)
    (folder / "train.jsonl").write_text("")
    with pytest.raises(UserError, match=r"train.jsonl and train.tsv for one split"):
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
