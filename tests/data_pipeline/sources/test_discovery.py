"""Which files are read: names, order, formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.sources.discovery import find_inputs
from data_pipeline.sources.hub import find_origin


def test_inputs_are_sorted_and_named_below_their_common_directory(tmp_path: Path) -> None:
    for name in ("c2/x.jsonl", "c1/x.jsonl", "c1/y.txt", "c1/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    names = [file.name for file in find_inputs([tmp_path / "c2", tmp_path / "c1"]).files]
    assert names == ["c1/x.jsonl", "c1/y.txt", "c2/x.jsonl"]
    assert [file.name for file in find_inputs([tmp_path / "c1"]).files] == ["x.jsonl", "y.txt"]


def test_inputs_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("{}\n")
    for name in ("a.pdf", "a.tar.gz", "a.tsv.zst"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "a.jsonl").write_text("{}\n")
    for inputs, message in (
        (["absent"], "absent does not exist"),
        (["a.bin"], "unknown ending"),
        (["a.tar.gz"], r"a.tar.gz is a tar archive; unpack it first, or give webdataset:FILE"),
        (["a.tsv.zst"], "a.tsv.zst is a table; give csv:FILE"),
        (["a.pdf"], "a.pdf is a PDF, not text; convert it: pdftotext"),
        (["a.jsonl", "a.jsonl"], "given twice"),
        ([".", "a.jsonl"], "given twice"),
    ):
        with pytest.raises(DataError, match=message):
            find_inputs([tmp_path / name for name in inputs])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no"):
        find_inputs([tmp_path / "empty"])


def test_another_programs_download_json_is_no_origin(tmp_path: Path) -> None:
    (tmp_path / "download.json").write_text('{"url": "a"}')
    assert find_origin(tmp_path / "corpus") is None
    (tmp_path / "download.json").write_text('{"revision": "a"}')
    with pytest.raises(DataError, match="delete it and download again"):
        find_origin(tmp_path / "corpus")


def test_hidden_directories_are_passed_over_below_an_input_but_not_above(tmp_path: Path) -> None:
    root = tmp_path / ".hidden" / "data"
    for name in ("a.jsonl", ".cache/b.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}\n")
    assert [file.name for file in find_inputs([root]).files] == ["a.jsonl"]
