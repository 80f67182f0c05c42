"""Many processes and machines on one directory: who works, who says so, what a death costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io import lease
from data_pipeline.io.lease import BusyError, Lease
from data_pipeline.io.pool import Progress, run_tasks
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import RecordReader
from tests.data_pipeline.helpers import REPOSITORY, Workshop, contents, quiet


def test_a_lease_is_held_by_one_and_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with Lease(path, "making x"):
        with pytest.raises(
            BusyError, match=rf"process {os.getpid()} on .* is making x; leave it to"
        ):
            Lease(path, "making x").__enter__()
        started = time.monotonic()
        with pytest.raises(BusyError, match=r"is making x after 0 s of waiting|after 0 s"):
            Lease(path, "making x", wait_seconds=0.3).__enter__()
        assert 0.3 <= time.monotonic() - started < 10
    assert list(tmp_path.iterdir()) == []
    with Lease(path, "making x"):
        pass


@pytest.mark.distributed
def test_a_lease_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    program = "import os; from pathlib import Path; from data_pipeline.io.lease import Lease; "
    program += f"Lease(Path({str(path)!r}), 'making x').__enter__(); os._exit(9)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY) as process:
        # Ended, and not reaped.
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None
        with Lease(path, "making x"):  # at once: the process is of this machine
            assert json.loads(path.read_bytes())["pid"] == os.getpid()


def test_a_lease_that_nobody_wrote_to_runs_out(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_bytes(b"")  # created, and its process died before it wrote
    with pytest.raises(BusyError, match="on an unknown host is making x"):
        Lease(path, "making x").__enter__()
    old = time.time() - lease.EXPIRES_AFTER - 5
    os.utime(path, (old, old))
    with Lease(path, "making x"):
        pass


def test_a_lease_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.05)
    with Lease(tmp_path / "x.lock", "making x"):
        os.utime(tmp_path / "x.lock", (1, 1))
        deadline = time.monotonic() + 10
        while os.stat(tmp_path / "x.lock").st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.stat(tmp_path / "x.lock").st_mtime > 2


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
@pytest.mark.parametrize("more", [(), ("--num-tasks", "1", "--task", "0")])
def test_two_jobs_at_once_give_the_same_bytes(
    workshop: Workshop, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Of the whole, and of the only task, of which one makes shards and the other does not."""
    out = tmp_path / "out"
    python = [sys.executable, "-m", "data_pipeline"]
    jobs = [
        subprocess.Popen(
            [*python, *workshop.command(out, *arguments)],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for arguments in ((), more)
    ]
    said = [job.communicate(timeout=200) for job in jobs]
    codes = [job.returncode for job in jobs]
    assert 0 in codes and set(codes) <= {0, 2}, said
    for code, (_, errors) in zip(codes, said, strict=True):
        assert "Traceback" not in errors
        assert code == 0 or "is making" in errors or "is finishing" in errors, errors
    if more and codes == [2, 0]:  # the task came first: it leaves the shards to another command
        assert not (out / "manifest.json").exists()
        workshop.tokenize(out)
    assert contents(out) == contents(workshop.shards)


def die_once(task: str, report) -> str:  # type: ignore[no-untyped-def]
    """A worker that is killed at its first sight of a task `once PATH`, and always at `always`."""
    report(Progress(task.split("/")[-1]))
    kind, _, path = task.partition(" ")
    if kind == "always" or (kind == "once" and not Path(path).exists()):
        if kind == "once":
            Path(path).touch()
        os.kill(os.getpid(), 9)
    return task.upper()


@pytest.mark.distributed
def test_a_worker_that_dies_costs_its_task_a_retry(tmp_path: Path) -> None:
    tasks = ["a", f"once {tmp_path}/x", "b", f"once {tmp_path}/y", "c"]
    assert run_tasks(die_once, tasks, 2, quiet) == [task.upper() for task in tasks]


@pytest.mark.distributed
def test_a_task_that_always_kills_is_named_and_the_others_go_on() -> None:
    done: list[str] = []
    tasks = ["always", "a", "b", "c", "d"]
    with pytest.raises(
        DataError, match=r"worker that was reading always was ended by SIGKILL, 2 times; every"
    ):
        run_tasks(die_once, tasks, 2, quiet, look=done.append)
    assert sorted(done) == ["A", "B", "C", "D"]


def test_inputs_are_read_once(tmp_path: Path) -> None:
    """Their hash is taken while they are parsed."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' * 200_000)
    (file,) = find_inputs([path]).files
    reader = RecordReader(file, RecordKeys())
    before = _read_bytes()
    count = sum(1 for _ in reader)
    digest = reader.sha256()
    assert count == 200_000 and len(digest) == 64
    assert _read_bytes() - before < 1.1 * file.size


def _read_bytes() -> int:
    entries = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(entries["rchar"])
