"""Which files are read: names, order, parts of large files, chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.sources.discovery import (
    InputFile,
    cut_into_pieces,
    find_inputs,
    parse_chunks,
)


def test_inputs_are_sorted_and_named_below_their_common_directory(tmp_path: Path) -> None:
    for name in ("c2/x.jsonl", "c1/x.jsonl", "c1/y.txt", "c1/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    names = [file.name for file in find_inputs([tmp_path / "c2", tmp_path / "c1"]).files]
    assert names == ["c1/x.jsonl", "c1/y.txt", "c2/x.jsonl"]
    assert [file.name for file in find_inputs([tmp_path / "c1"]).files] == ["x.jsonl", "y.txt"]


def test_inputs_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("{}\n")
    (tmp_path / "a.jsonl").write_text("{}\n")
    for inputs, message in (
        (["absent"], "absent does not exist"),
        (["a.csv"], "unknown ending"),
        (["a.jsonl", "a.jsonl"], "given twice"),
        ([".", "a.jsonl"], "given twice"),
    ):
        with pytest.raises(DataError, match=message):
            find_inputs([tmp_path / name for name in inputs])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no"):
        find_inputs([tmp_path / "empty"])


def test_hidden_directories_are_passed_over_below_an_input_but_not_above(tmp_path: Path) -> None:
    root = tmp_path / ".hidden" / "data"
    for name in ("a.jsonl", ".cache/b.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}\n")
    assert [file.name for file in find_inputs([root]).files] == ["a.jsonl"]


def test_only_a_large_plain_jsonl_is_cut(tmp_path: Path) -> None:
    for name, expected in (
        ("a.jsonl", [(0, 40), (40, 80), (80, 100)]),
        ("a.jsonl.zst", [(0, 100)]),
    ):
        pieces = cut_into_pieces(InputFile(tmp_path / name, name, 100), 40)
        assert [(piece.start, piece.end) for piece in pieces] == expected
    assert len(cut_into_pieces(InputFile(tmp_path / "a.jsonl", "a.jsonl", 100), 100)) == 1


def test_chunks(tmp_path: Path) -> None:
    for place in ("chunk1", "chunk2", "chunk10", "other"):
        (tmp_path / "train" / place).mkdir(parents=True)
        (tmp_path / "train" / place / "a.jsonl").write_text("{}\n")
    assert parse_chunks("1, 3-5,4") == {1, 3, 4, 5}
    names = [file.name for file in find_inputs([tmp_path], "1,10").files]
    assert names == ["train/chunk1/a.jsonl", "train/chunk10/a.jsonl"]
    assert len(find_inputs([tmp_path], "").files) == 4
    mistakes = {"3": "no input lies in a directory chunk3", "5-1": "not a list", "x": "not a list"}
    for chunks, message in mistakes.items():
        with pytest.raises(DataError, match=message):
            find_inputs([tmp_path], chunks)
