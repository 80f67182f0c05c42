"""Reading documents: formats, keys, and lines and files that are not right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.sources import Document, RecordKeys, find_inputs, read_documents

RECORDS = [
    {"text": "first\nwith a line", "meta": {"redpajama_set_name": "Books"}},
    {"text": "naïve – 数字 \u0000", "meta": {"redpajama_set_name": "Web"}},
    {"text": "no source"},
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
EXPECTED = [("first\nwith a line", "Books"), ("naïve – 数字 \u0000", "Web"), ("no source", "default")]


def documents(path: Path, keys: RecordKeys | None = None) -> list[Document]:
    (file,) = find_inputs([path])
    return list(read_documents(file, keys or RecordKeys()))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", LINES.rstrip(b"\n")),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        # Two frames, the first one ending inside a line: readers that stop at the first frame lose the rest.
        ("a.jsonl.zst", zstandard.compress(LINES[:30]) + zstandard.compress(LINES[30:])),
    ],
)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found = documents(tmp_path / name)
    assert [(document.text, document.source) for document in found] == EXPECTED
    assert [document.id for document in found] == [f"{name}:1", f"{name}:2", f"{name}:3"]


def test_text_file_is_one_document_and_blank_lines_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    assert [document.text for document in documents(tmp_path / "a.txt")] == ["one\n\ntwo"]
    (tmp_path / "b.jsonl").write_bytes(b"\n" + LINES + b"\n  \n")
    assert len(documents(tmp_path / "b.jsonl")) == 3


def test_keys_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": {"raw": "hello"}, "from": "mail"}\n')
    (found,) = documents(tmp_path / "a.jsonl", RecordKeys(text="body.raw", source="from"))
    assert (found.text, found.source) == ("hello", "mail")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not valid JSON"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b'{"text": "\xff"}', "not valid JSON"),
        (b'{"txt": "x"}', 'no "text"'),
        (b'["text"]', 'no "text"'),
        (b'{"text": 5}', "int, not a string"),
        (b'{"text": "x", "meta": {"redpajama_set_name": 7}}', "not a non-empty string"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(LINES + line + b"\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:4: .*{reason}"):
        documents(path)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz"])
def test_a_file_that_is_cut_short_or_damaged_is_named(tmp_path: Path, name: str) -> None:
    whole = (zstandard.compress if name.endswith("zst") else gzip.compress)(LINES * 500)
    path = tmp_path / name
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=rf"{name} is cut short"):
        documents(path)
    path.write_bytes(b"not compressed at all")
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        documents(path)


def test_inputs_are_sorted_and_named_below_their_common_directory(tmp_path: Path) -> None:
    for name in ("c2/x.jsonl", "c1/x.jsonl", "c1/y.txt", "c1/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    names = [file.name for file in find_inputs([tmp_path / "c2", tmp_path / "c1"])]
    assert names == ["c1/x.jsonl", "c1/y.txt", "c2/x.jsonl"]
    assert [file.name for file in find_inputs([tmp_path / "c1"])] == ["x.jsonl", "y.txt"]


def test_inputs_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "a.jsonl").write_text("")
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
