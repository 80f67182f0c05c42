"""Leases: one holder however many start at once; the dead, renamed and late are recognised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.lease import EXPIRES_AFTER, BusyError, Holder, Lease, held
from tests.data_pipeline.helpers import files_limited_to
from tests.ranks import ROOT

PATIENCE = 60


def left(path: Path, holder: Holder, age: float = 0.0) -> Path:
    path.write_text(json.dumps(vars(holder)))
    os.utime(path, (time.time() - age,) * 2)
    return path


def gone() -> Holder:
    """A process of this machine that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return replace(Holder.this(), pid=done.pid, started="1")


def start(path: Path, start_together: Any, all_tried: Any, holders: Any, rounds: int) -> None:
    """Take the lease of every round, as one of several, and keep it until all have tried."""
    for number in range(rounds):
        lease = Lease(path / str(number), "testing")
        start_together.wait(PATIENCE)
        try:
            lease.__enter__()
        except BusyError:
            all_tried.wait(PATIENCE)
            continue
        with holders.get_lock():
            holders[number] += 1
        all_tried.wait(PATIENCE)
        lease.__exit__(None, None, None)


def test_a_lease_is_held_by_one_and_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with Lease(path, "making x"):
        with pytest.raises(
            BusyError, match=rf"process {os.getpid()} on .* is making x; leave it to"
        ):
            Lease(path, "making x").__enter__()
        started = time.monotonic()
        with pytest.raises(BusyError, match=r"is making x after 0 s of waiting; leave it to"):
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
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as process:
        # Ended, and not reaped.
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None
        with Lease(path, "making x"):  # at once: the process is of this machine
            assert json.loads(path.read_bytes())["pid"] == os.getpid()


def test_a_lease_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.io.lease.RENEWED_EVERY", 0.05)
    with Lease(tmp_path / "x.lock", "making x"):
        os.utime(tmp_path / "x.lock", (1, 1))
        deadline = time.monotonic() + 10
        while os.stat(tmp_path / "x.lock").st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.stat(tmp_path / "x.lock").st_mtime > 2


def test_a_lock_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        files_limited_to(0),
        pytest.raises(DataError, match=r"^cannot write the lock .*x\.lock: File too large$"),
        held(tmp_path / "x.lock", "testing"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "units").touch()
    with (
        pytest.raises(DataError, match=r"cannot write the lock .*units/x\.lock: Not a directory"),
        held(tmp_path / "units/x.lock", "testing"),
    ):
        pass


@pytest.mark.distributed
@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("starters", [2, 6])
def test_of_starters_at_once_one_takes_a_dead_ones_lease(
    starters: int, rounds: int, tmp_path: Path
) -> None:
    dead = gone()
    for number in range(rounds):
        left(tmp_path / str(number), dead)
    fork = get_context("fork")
    barriers = [fork.Barrier(starters) for _ in range(2)]
    holders = fork.Array("i", rounds)
    processes = [
        fork.Process(target=start, args=(tmp_path, *barriers, holders, rounds))
        for _ in range(starters)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * PATIENCE)
    assert [process.exitcode for process in processes] == [0] * starters
    assert list(holders) == [1] * rounds
    assert list(tmp_path.iterdir()) == []


OTHERS: dict[str, Callable[[Holder], Holder]] = {
    "another machine of this name": lambda here: replace(here, boot="another", pid=1),
    "another container": lambda here: replace(here, space="pid:[1]"),
    "a copy of this virtual machine": lambda here: replace(here, host="copy"),
    "a machine that does not tell its boot": lambda here: replace(here, boot=""),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_machine_is_waited_for(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.io.lease.WATCHED_FOR", 0.05)
    path = left(tmp_path / "lock", OTHERS[other](gone()))
    with pytest.raises(BusyError) as refusal:
        Lease(path, "testing").__enter__()
    assert not refusal.value.certain
    left(path, OTHERS[other](gone()), age=EXPIRES_AFTER + 1)
    with Lease(path, "testing", wait_seconds=PATIENCE):
        pass


def test_a_clock_that_was_set_forward_ends_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease looks an hour old until its holder, on another machine, renews it again."""
    path = left(tmp_path / "lock", replace(gone(), host="n17", boot="another"), age=3600)
    with pytest.raises(BusyError):
        Lease(path, "testing").__enter__()
    monkeypatch.setattr("data_pipeline.io.lease.WATCHED_FOR", 0.05)
    late = Lease(path, "testing")
    for age in range(3600, 3000, -100):
        left(path, replace(gone(), host="n17", boot="another"), age=age)
        with pytest.raises(BusyError):
            late.__enter__()


def test_a_living_process_of_this_machine_keeps_its_lease_however_old(tmp_path: Path) -> None:
    """As one that is suspended, or with a clock set forward; the name of the machine may change."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        holder = replace(Holder.this(), pid=process.pid, started=started, host="earlier-name")
        path = left(tmp_path / "lock", holder, age=3600)
        with pytest.raises(BusyError, match=f"process {process.pid} on earlier-name") as refusal:
            Lease(path, "testing").__enter__()
        assert refusal.value.certain
        process.communicate(b"\n")


RENAMED = """
import json, os, socket, sys, time
from pathlib import Path
import data_pipeline.io.lease as lease
lease.RENEWED_EVERY = 0.02
with lease.Lease(Path(sys.argv[1]), "making x") as held:
    socket.sethostname("renamed-by-a-test")
    os.environ.update(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    lease._BOOT = "/nowhere"
    os.utime(sys.argv[1], (1, 1))
    while os.stat(sys.argv[1]).st_mtime < 2 and not held.lost:
        time.sleep(0.01)
    print(held.lost, lease.Holder.this().host, flush=True)
    input()
print(Path(sys.argv[1]).exists())
"""


@pytest.mark.distributed
def test_a_process_whose_machine_gets_another_name_keeps_its_lease(tmp_path: Path) -> None:
    names = ["unshare", "--user", "--map-root-user", "--uts"]
    if subprocess.run([*names, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of users")
    path = tmp_path / "lock"
    command = [*names, sys.executable, "-c", RENAMED, str(path)]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False renamed-by-a-test\n"
        with pytest.raises(BusyError, match="is testing; leave it to") as refusal:
            Lease(path, "testing").__enter__()
        assert refusal.value.certain
        assert process.communicate("\n")[0] == "False\n"


def test_a_process_of_the_same_number_is_another(tmp_path: Path) -> None:
    """As after a restart of a container: this process's number, on a lease that it did not take."""
    path = left(tmp_path / "lock", replace(Holder.this(), started="1"))
    with Lease(path, "testing") as lease:
        assert lease.holder() == Holder.this()
    assert not path.exists()


def test_a_lease_from_the_future_counts_from_when_it_is_seen(tmp_path: Path) -> None:
    path = left(tmp_path / "lock", replace(gone(), host="n17"), age=-3600)
    lease = Lease(path, "testing")
    with pytest.raises(BusyError):
        lease.__enter__()
    age = lease.age()
    assert age is not None and 0 <= age < 10


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"host": "h", "space": "", "pid": "x"}',
        b'{"host": "h", "space": "", "pid": 1' + b"0" * 30 + b"}",
        b'{"host": "h", "space": "", "pid": -1}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"host": ["h"], "space": "", "pid": 1}',
    ],
    ids=lambda content: content[:40],
)
def test_a_lease_with_anything_in_it_is_of_an_unknown_holder(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.write_bytes(content)
    with pytest.raises(BusyError, match="an unknown host is testing") as refusal:
        Lease(path, "testing").__enter__()
    assert not refusal.value.certain
    os.utime(path, (time.time() - EXPIRES_AFTER - 1,) * 2)
    monkeypatch.setattr("data_pipeline.io.lease.WATCHED_FOR", 0.05)
    with Lease(path, "testing", wait_seconds=PATIENCE) as lease:
        assert lease.holder() == Holder.this()


def test_what_is_no_regular_file_is_no_lease_and_nobody_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for make in (
        lambda: path.symlink_to(tmp_path / "nowhere"),
        lambda: os.mkfifo(path),
        path.mkdir,
    ):
        make()
        with pytest.raises(
            DataError, match="is not a regular file, so it is not a lock of testing"
        ):
            Lease(path, "testing").__enter__()
        path.rmdir() if path.is_dir() else path.unlink()
