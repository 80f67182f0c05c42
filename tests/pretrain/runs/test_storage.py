"""Sentences about a file system that takes no more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pretrain.__main__ import app
from pretrain.errors import UserError
from pretrain.runs.storage import refuse_unwritable, storage_sentence
from tests.ranks import ROOT
from tools.faults.inflict import STANDS, build_shim, failing_storage


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory there; skip the test where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if (done := subprocess.run(command, capture_output=True)).returncode:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.distributed
def test_no_room_for_another_file_is_not_told_as_no_room_for_bytes(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=16m,nr_inodes=2"):
        (tmp_path / "one").touch()
        with pytest.raises(OSError) as refusal:
            (tmp_path / "two").touch()
        sentence = storage_sentence(refusal.value, tmp_path, needed=1000)
    assert "16.8 MB are free, but it may hold no more files); make room there" in sentence


def test_a_file_system_that_answers_nobody_is_seen_to_stand(tmp_path: Path) -> None:
    if (shim := build_shim(tmp_path)) is None:
        pytest.skip("there is no C compiler")
    standing, other = tmp_path / "standing", tmp_path / "other"
    standing.mkdir()
    other.mkdir()
    program = (
        "import sys; from pathlib import Path; from pretrain.runs.storage import stands;"
        "print([stands(Path(each), 1.0) for each in sys.argv[1:]], flush=True)"
    )
    environment = os.environ | failing_storage(
        shim, standing, counter=tmp_path / "counter", after=0, error=STANDS
    )
    command = [sys.executable, "-c", program, standing, other, tmp_path / "nowhere"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[True, False, False]\n", done.stderr
    assert list(standing.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "compare RUN",
        "diff RUN RUN",
        "evaluate anatomy RUN",
        "evaluate approximation",
        "evaluate diversity RUN",
        "evaluate glue RUN --data RUN --tasks rte",
        "evaluate length RUN",
        "evaluate tasks RUN --tasks arc_easy",
        "replay RUN",
        "trial RUN",
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    line: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "below"):
        words = line.replace("RUN", str(tmp_path / "none")).split()
        done = CliRunner().invoke(app, [*words, "--out", str(out)])
        assert str(done.exception) == (
            f"--out {out} cannot be written: {file} is not a directory; name another directory"
        )


def test_a_directory_that_is_not_there_yet_can_be_written(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "not" / "there")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path, "ro"), pytest.raises(UserError) as refused:
        refuse_unwritable(tmp_path / "not" / "there")
    assert f"{tmp_path} takes no new files (its permissions, or it is mount" in str(refused.value)
