"""The lock of a run directory.

One trains there, whoever else comes is told who, and a dead one is no one.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from data_pipeline.io import lease
from data_pipeline.io.lease import EXPIRES_AFTER, Holder
from pretrain.errors import UserError
from pretrain.runs.lock import RunLock

ELSEWHERE = {"host": "n17", "space": "", "pid": 4711, "job": "12 of mine", "restarts": 1}


def held_elsewhere(run: Path, age: float, **changes: object) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    lock = run / "lock"
    lock.write_text(json.dumps({**ELSEWHERE, **changes}))
    os.utime(lock, (time.time() - age,) * 2)
    return lock


def test_the_second_is_told_who_trains_and_the_first_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    first = RunLock(run)
    assert first.take()
    me = (
        rf"process {os.getpid()} on .* is training .*r and renewed its lock \d s ago; leave it to "
        r"that one"
    )
    with pytest.raises(UserError, match=me):
        RunLock(run).take()
    assert first.lost is None
    first.release()
    assert list(tmp_path.iterdir()) == []
    (run / "checkpoints").mkdir(parents=True)
    second = RunLock(run)
    assert second.take()
    second.release()
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


def test_a_place_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        RunLock(tmp_path / "file" / "r").take()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_on_another_machine_it_holds_while_it_is_renewed_and_then_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = held_elsewhere(tmp_path, age=40.0)
    lock = RunLock(tmp_path)
    assert not lock.take()
    assert "process 4711 on n17, job 12 of mine renewed it 40 s ago" in lock.waited_for
    assert not lock.take()
    os.utime(file)
    with pytest.raises(
        UserError, match=r"process 4711 on n17, job 12 of mine is training .* renewed its lock 0"
    ):
        lock.take()
    held_elsewhere(tmp_path, age=EXPIRES_AFTER + 2)
    assert not lock.take()
    assert "it is free after 90 s without a renewal, 20 s of them watched" in lock.waited_for
    monkeypatch.setattr(lease, "WATCHED_FOR", 0.0)
    assert lock.take()
    lock.release()


@pytest.mark.parametrize(
    ("job", "cluster", "restarts", "enters"),
    [
        ("12", "mine", "2", True),
        ("12", "mine", "1", False),
        ("12", "other", "2", False),
        ("13", "mine", "2", False),
    ],
)
def test_a_requeued_job_enters_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    cluster: str,
    restarts: str,
    enters: bool,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", cluster)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    held_elsewhere(tmp_path, age=1.0)
    lock = RunLock(tmp_path)
    assert lock.take() is enters
    if enters:
        assert Holder(**json.loads((tmp_path / "lock").read_text())) == Holder.this()
        lock.release()


def test_whoever_lost_it_says_so_and_leaves_it_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.02)
    lock = RunLock(tmp_path)
    assert lock.take()
    file = held_elsewhere(tmp_path, age=0.0)
    deadline = time.monotonic() + 10
    while lock.lost is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (
        lock.lost is not None and "4711 on n17" in lock.lost and "stops without saving" in lock.lost
    )
    lock.release()
    assert json.loads(file.read_text()) == ELSEWHERE


def test_a_lost_lock_is_seen_at_once_after_a_suspension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunLock(tmp_path / "r")
    assert lock.take() and lock.lost is None
    (tmp_path / "r/lock").write_text(json.dumps(ELSEWHERE))
    assert lock.lost is None  # the file was looked at a moment ago
    monkeypatch.setattr(lease, "CONFIRMED_FOR", 0.0)
    assert "has lost the lock, as after a suspension" in str(lock.lost)
    (tmp_path / "r/lock").unlink()
    (tmp_path / "r").rmdir()
    assert "r was moved or removed in training; move it back" in str(lock.lost)
    lock.release()
