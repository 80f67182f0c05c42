"""Every entry of an input directory is read or named; nothing waits for a pipe."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources.discovery import COMPANION, Inputs, find_inputs
from tests.data_pipeline.helpers import Workshop, run

LINE = b'{"text": "a document of a few words"}\n'


def passed_over(root: Path) -> dict[str, str]:
    return {entry.name: entry.reason for entry in find_inputs([root]).passed_over}


def test_whatever_is_not_read_is_named_with_the_reason(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.jsonl").write_bytes(LINE)
    (root / "b.bin").write_bytes(LINE)
    (root / "c.json").write_bytes(b"[]")
    (root / "d.pdf").write_bytes(b"%PDF")
    (root / "empty.jsonl.zst").write_bytes(b"")
    (root / "gone.jsonl").symlink_to(root / "absent")
    os.mkfifo(root / "pipe.jsonl")
    os.mkfifo(root / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "s.jsonl"))
        inputs = find_inputs([root])
    assert [file.path for file in inputs.files] == [root / "a.jsonl"]
    reasons = passed_over(root)
    assert reasons.pop("c.json").startswith("JSON as a whole; write one record a line: jq -c")
    assert reasons.pop("d.pdf").startswith("a PDF, not text; convert it: pdftotext")
    assert reasons == {
        "b.bin": "unknown ending",
        "empty.jsonl.zst": "empty",
        "gone.jsonl": "broken link",
        "pipe.jsonl": "a pipe",
        "pipe.txt": "a pipe",
        "s.jsonl": "a socket",
    }


def test_companions_of_the_data_are_left_out_and_listed(tmp_path: Path) -> None:
    for name in (
        "README.md",
        "readme.txt",
        "LICENSE",
        "LICENCE.txt",
        ".gitattributes",
        "download.json",
    ):
        (tmp_path / name).write_bytes(LINE)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "part.jsonl").write_bytes(LINE)
    (tmp_path / "a.jsonl").write_bytes(LINE)
    assert set(passed_over(tmp_path).values()) == {COMPANION} and len(passed_over(tmp_path)) == 7
    assert [file.name for file in find_inputs([tmp_path]).files] == ["a.jsonl"]


def test_a_download_that_has_not_ended_is_named(tmp_path: Path) -> None:
    (tmp_path / "download.unfinished.json").write_bytes(LINE)
    (tmp_path / "a.jsonl").write_bytes(LINE)
    assert passed_over(tmp_path) == {
        "download.unfinished.json": "its download has not ended; run the same download command "
        "again"
    }


def test_linked_directories_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for directory in (root / "z_real", elsewhere / "deep"):
        directory.mkdir(parents=True)
        (directory / "a.jsonl").write_bytes(LINE)
    (root / "a_link_to_real").symlink_to(root / "z_real")
    (root / "linked").symlink_to(elsewhere)
    (elsewhere / "deep" / "back").symlink_to(root)  # a loop
    assert sorted(file.name for file in find_inputs([root]).files) == [
        "linked/deep/a.jsonl",
        "z_real/a.jsonl",
    ]
    assert passed_over(root) == {
        "a_link_to_real": "the same directory as z_real",
        "linked/deep/back": "the same directory as .",
    }


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that any user may enter, unlike pytest's."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def inputs_of_nobody(root: Path) -> Inputs:
    """Inputs that a user without rights finds, for root may enter anything."""
    user_id = os.geteuid()
    if user_id == 0:
        os.seteuid(65534)
    try:
        return find_inputs([root])
    finally:
        os.seteuid(user_id)


def test_a_directory_without_permission_is_named(open_directory: Path) -> None:
    (open_directory / "a.jsonl").write_bytes(LINE)
    (open_directory / "closed").mkdir(mode=0o000)
    inputs = inputs_of_nobody(open_directory)
    assert [file.path for file in inputs.files] == [open_directory / "a.jsonl"]
    assert [(entry.name, entry.reason) for entry in inputs.passed_over] == [
        ("closed", "permission denied")
    ]


def test_endings_of_any_case_and_packing_are_read(workshop: Workshop, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    contents = {
        "a.JSONL": LINE,
        "b.jsonl.xz": lzma.compress(LINE),
        "c.jsonl.zstd": zstandard.compress(LINE),
        "d.json.zst": zstandard.compress(LINE),
        "e.JSON.Zst": zstandard.compress(LINE),
        "f.ndjson": LINE,
        "G.TXT": b"plain",
        "h.MD": b"plain",
        "i.json.xz": lzma.compress(LINE),
        "j.txt.gz": gzip.compress(b"plain"),
    }
    for name, content in contents.items():
        (root / name).write_bytes(content)
    (root / "README.md").write_bytes(b"about")
    (root / "notes.bin").write_bytes(b"?")
    os.mkfifo(root / "pipe.jsonl")
    done = run(*workshop.command(tmp_path / "out", corpus=root))
    assert done.code == 0, done.err
    assert done.err == "  not read (a pipe): pipe.jsonl\n  not read (unknown ending): notes.bin\n"
    assert "left out: README.md" in done.out
    manifest = read_manifest(tmp_path / "out")
    assert sum(entry.documents for entry in manifest.inputs) == len(contents)
    stated = {entry["name"]: entry["reason"] for entry in manifest.passed_over}
    assert stated == {"README.md": COMPANION, "notes.bin": "unknown ending", "pipe.jsonl": "a pipe"}
    strict = workshop.command(tmp_path / "strict", "--strict", corpus=root)
    assert "not read (a pipe): pipe.jsonl" in run(*strict).sentence()
    assert not (tmp_path / "strict").exists()
    (root / "pipe.jsonl").unlink()
    (root / "notes.bin").unlink()
    assert run(*strict).code == 0  # a README is no reason


def test_an_input_that_holds_nothing_is_said(workshop: Workshop, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.jsonl").write_bytes(LINE)
    (root / "b.jsonl.zst").write_bytes(zstandard.compress(b""))
    done = run(*workshop.command(tmp_path / "out", corpus=root))
    assert done.code == 0 and "1 inputs hold no lines: b.jsonl.zst" in done.out, done.err


def test_names_that_are_no_text_are_read_and_written(workshop: Workshop, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for number, name in enumerate((b"caf\xe9.jsonl", "数.jsonl".encode())):
        (root / os.fsdecode(name)).write_bytes(LINE * (number + 1) + (b"{bad\n" if number else b""))
    out = tmp_path / "out"
    command = workshop.command(out, "--validation-fraction", "0", corpus=root)
    done = run(*command, "--max-reject-rate", "0.5")
    assert done.code == 0, done.err
    assert "already up to date" in run(*command).out
    names = [os.fsencode(entry.name) for entry in read_manifest(out).inputs]
    assert sorted(names) == sorted([b"caf\xe9.jsonl", "数.jsonl".encode()])
    assert json.loads((out / "rejects.jsonl").read_bytes())["file"] == "数.jsonl"
    checked = run("verify", out)
    assert checked.code == 0 and "2 units are as in the source text" in checked.out, checked.err


def test_a_link_that_cannot_be_followed_is_named(open_directory: Path) -> None:
    root, private = open_directory / "in", open_directory / "private"
    (private / "deep").mkdir(parents=True)
    root.mkdir()
    (root / "a.jsonl").write_bytes(LINE)
    (root / "round").symlink_to(root / "about")
    (root / "about").symlink_to(root / "round")
    (root / "closed").symlink_to(private / "deep")
    private.chmod(0o000)
    inputs = inputs_of_nobody(root)
    loop = "too many levels of symbolic links"
    stated = {entry.name: entry.reason for entry in inputs.passed_over}
    assert stated == {"about": loop, "round": loop, "closed": "permission denied"}
    assert [file.name for file in inputs.files] == ["a.jsonl"]


def test_data_with_the_name_of_a_companion_is_read(tmp_path: Path) -> None:
    names = ["License-CC.parquet", "license_mit/a.jsonl", "readme_corpus.jsonl", "README.json.gz"]
    for name in (*names, "README.txt", "license_mit/LICENSE", "README_de.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINE)
    assert {file.name for file in find_inputs([tmp_path]).files} == set(names)
    assert set(passed_over(tmp_path)) == {"README.txt", "license_mit/LICENSE", "README_de.md"}


def test_a_file_of_two_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "z.jsonl").write_bytes(LINE)
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "z.jsonl")
    (tmp_path / "zz.jsonl").hardlink_to(tmp_path / "z.jsonl")
    (file,) = find_inputs([tmp_path]).files
    assert (file.name, file.size) == ("z.jsonl", len(LINE))
    same = "the same file as z.jsonl"
    assert passed_over(tmp_path) == {"a.jsonl": same, "zz.jsonl": same}
