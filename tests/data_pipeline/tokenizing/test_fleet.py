"""Several jobs on one directory: who works, and who says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.lease import Lease
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import RecordReader
from tests.data_pipeline.helpers import REPOSITORY, Workshop, contents


def test_of_two_jobs_of_a_task_one_works_and_the_other_says_so(
    workshop: Workshop, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    me = rf"process {os.getpid()} on .*"
    with (
        Lease(out / "units" / "task_0_of_1.lock", "making it"),
        pytest.raises(DataError, match=rf"{me} is making .*out; leave it to that one"),
    ):
        workshop.tokenize(out)
    assert not list((out / "units").glob("*.json"))
    workshop.make_tasks(out, 1)
    with (
        Lease(out / "units" / "joining.lock", "joining"),
        pytest.raises(DataError, match=rf"{me} is finishing .*out"),
    ):
        workshop.tokenize(out)


@pytest.mark.distributed
def test_jobs_at_once_give_the_same_bytes(workshop: Workshop, tmp_path: Path) -> None:
    """Two of the whole, and one of the only task, which makes no shards."""
    out = tmp_path / "out"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "data_pipeline", *workshop.command(out, *more)],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for more in ((), (), ("--num-tasks", "1", "--task", "0"))
    ]
    said = [job.communicate(timeout=200) for job in jobs]
    codes = [job.returncode for job in jobs]
    assert 0 in codes and set(codes) <= {0, 2}, said
    for code, (_, errors) in zip(codes, said, strict=True):
        assert "Traceback" not in errors
        assert code == 0 or "is making" in errors or "is finishing" in errors, errors
    if codes == [2, 2, 0]:  # the task came first: it leaves the shards to another command
        assert not (out / "manifest.json").exists()
        workshop.tokenize(out)
    assert contents(out) == contents(workshop.shards)


def test_inputs_are_read_once(tmp_path: Path) -> None:
    """Their hash is taken while they are parsed."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' * 200_000)
    (file,) = find_inputs([path]).files
    reader = RecordReader(file, RecordKeys())
    bytes_at_start = _read_bytes()
    count = sum(1 for _ in reader)
    digest = reader.sha256()
    assert count == 200_000 and len(digest) == 64
    assert _read_bytes() - bytes_at_start < 1.1 * file.size


def _read_bytes() -> int:
    entries = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(entries["rchar"])
