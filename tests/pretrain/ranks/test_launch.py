"""The local launcher with plain Python programs as ranks.

Environment, exit codes, signals, orphans.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pretrain.ranks import launch
from pretrain.ranks.launch import launch_local_ranks
from pretrain.ranks.signals import CONTINUE_LATER, STOP
from tests.ranks import ROOT, rank_environment, run_program
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.distributed

LAUNCH = """
import sys
from pretrain.ranks.launch import launch_local_ranks
sys.exit(launch_local_ranks(sys.argv[2:], int(sys.argv[1])))
"""


def program(directory: Path, text: str) -> list[str]:
    """The command of ranks that run `text`, which has `directory`, `rank` and the usual modules."""
    path = directory / "rank.py"
    head = "import os, pathlib, signal, sys, time\n"
    path.write_text(
        f"{head}directory, rank = pathlib.Path({str(directory)!r}), "
        f"int(os.environ['RANK'])\n{text}\n"
    )
    return [sys.executable, str(path)]


def wait_for(*paths: Path, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path for path in paths if not path.exists()]
        time.sleep(0.01)


def gone(number: int) -> bool:
    return not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_the_store_listens_on_this_machine_only(tmp_path: Path) -> None:
    text = """
import psutil
port = int(os.environ["MASTER_PORT"])
parent = psutil.Process(os.getppid()).net_connections("tcp")
listens = [c.laddr.ip for c in parent if c.status == "LISTEN" and c.laddr.port == port]
(directory / "listens").write_text(" ".join(listens))
"""
    assert launch_local_ranks(program(tmp_path, text), 1) == 0
    assert (tmp_path / "listens").read_text() == "127.0.0.1"


def test_every_rank_gets_torchruns_variables(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    text = f"""
import json
(directory / f"{{rank}}").write_text(json.dumps({{name: os.environ[name] for name in {names}}}))
"""
    assert launch_local_ranks(program(tmp_path, text), 3) == 0
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    ports = {environment.pop("MASTER_PORT") for environment in seen}
    assert len(ports) == 1 and int(ports.pop()) > 0
    assert seen == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
        }
        for rank in range(3)
    ]


def test_threads_are_shared_out_unless_the_user_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = program(tmp_path, "(directory / f'{rank}').write_text(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pretrain.ranks.launch.usable_cores", lambda: 7)
    launch_local_ranks(command, 2)
    assert (tmp_path / "1").read_text() == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch_local_ranks(command, 2)
    assert (tmp_path / "1").read_text() == "5"


def test_the_first_failing_ranks_exit_code_comes_back_and_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.ranks.launch.GRACE_SECONDS", 0.5)
    text = """
(directory / f"{rank}").write_text(str(os.getpid()))
while not all((directory / f"{other}").exists() for other in range(3)): time.sleep(0.01)
if rank == 1: sys.exit(7)
time.sleep(300)
"""
    started = time.monotonic()
    assert launch_local_ranks(program(tmp_path, text), 3) == 7
    assert time.monotonic() - started < 20
    assert all(gone(int((tmp_path / str(rank)).read_text())) for rank in range(3))


def test_ranks_that_fail_alike_end_by_themselves_and_at_once(tmp_path: Path) -> None:
    text = "time.sleep(0.3 * rank); (directory / f'{rank}').touch(); sys.exit(2)"
    started = time.monotonic()
    assert launch_local_ranks(program(tmp_path, text), 2) == 2
    assert (tmp_path / "1").exists()  # it was given the time to speak for itself
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(("number", "meaning"), [(9, "memory is full"), (7, "was cut short")])
def test_the_rank_that_a_signal_ended_is_named_whoever_else_fails_for_it(
    number: int, meaning: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"""
other = directory / "1"
if rank == 1:
    other.write_text(str(os.getpid()))
    time.sleep(300)
while not (other.exists() and other.read_text()): time.sleep(0.01)
os.kill(int(other.read_text()), {number})
sys.exit(1)
"""
    assert launch_local_ranks(program(tmp_path, text), 2) == 128 + number
    message = capfd.readouterr().err
    assert message.startswith(f"rank 1 was ended by signal {number} (") and meaning in message


def test_signals_and_ctrl_c_reach_every_rank_once(tmp_path: Path) -> None:
    """The ranks end by themselves, with 0, after the third signal.

    So the launcher lives on and returns 0.
    """
    text = """
seen = []
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: seen.append(signal.Signals(number).name))
(directory / f"ready-{rank}").touch()
while "SIGTERM" not in seen:
    time.sleep(0.01)
    for name in list(seen): (directory / f"{name}-{rank}").touch()
(directory / f"{rank}").write_text(" ".join(seen))
"""
    command = [sys.executable, "-c", LAUNCH, "2", *program(tmp_path, text)]
    # A session of its own stands for a terminal's foreground group, to which Ctrl-C goes as a
    # whole.
    with subprocess.Popen(
        command, cwd=ROOT, env=rank_environment(), start_new_session=True
    ) as launcher:
        try:
            wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
            launcher.send_signal(signal.SIGUSR1)
            wait_for(tmp_path / "SIGUSR1-0", tmp_path / "SIGUSR1-1")
            os.killpg(launcher.pid, signal.SIGINT)
            wait_for(tmp_path / "SIGINT-0", tmp_path / "SIGINT-1")
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=120) == 0
        finally:
            launcher.kill()  # else a failed wait would wait for it for ever
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [
        "SIGUSR1 SIGINT SIGTERM"
    ] * 2


def test_a_signal_before_the_first_rank_reaches_the_ranks_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        if "asked" not in os.environ:
            monkeypatch.setenv("asked", "")
            os.kill(os.getpid(), signal.SIGTERM)
        return started(*words, **options)

    started = subprocess.Popen
    monkeypatch.setattr(launch.subprocess, "Popen", start)
    assert launch_local_ranks(program(tmp_path, "time.sleep(300)"), 2) == 128 + signal.SIGTERM


def test_the_caller_has_its_own_handlers_again(tmp_path: Path) -> None:
    numbers = (*CONTINUE_LATER, *STOP)
    handlers = [signal.getsignal(number) for number in numbers]
    launch_local_ranks(program(tmp_path, "sys.exit(3)"), 1)
    assert [signal.getsignal(number) for number in numbers] == handlers


def test_a_second_ctrl_c_ends_ranks_that_do_not_hear_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pretrain.ranks.launch.HASTE_SECONDS", 0.5)
    text = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
(directory / f"{rank}").touch()
time.sleep(300 * rank)
"""

    def interrupt() -> None:
        wait_for(tmp_path / "0", tmp_path / "1")
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    person = threading.Thread(target=interrupt)
    person.start()
    started = time.monotonic()
    assert launch_local_ranks(program(tmp_path, text), 2) == 128 + signal.SIGINT
    assert time.monotonic() - started < 20
    person.join()
    assert capfd.readouterr().err == "killed rank 1, which did not end after Ctrl-C\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_killing_the_launcher_kills_the_ranks(tmp_path: Path) -> None:
    text = """
(directory / f".{rank}").write_text(str(os.getpid()))
(directory / f".{rank}").rename(directory / f"{rank}")
time.sleep(300)
"""
    command = [sys.executable, "-c", LAUNCH, "2", *program(tmp_path, text)]
    with subprocess.Popen(command, cwd=ROOT, env=rank_environment()) as launcher:
        wait_for(tmp_path / "0", tmp_path / "1")
        ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
        assert not any(gone(rank) for rank in ranks)
        launcher.kill()
    deadline = time.monotonic() + 10
    try:
        while not all(gone(rank) for rank in ranks):
            assert time.monotonic() < deadline, "a rank outlived its launcher"
            time.sleep(0.01)
    finally:
        for rank in ranks:
            if not gone(rank):
                os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize(
    ("launched", "environment", "said"),
    [
        (["--local-ranks", "2"], {}, "ranks of one machine meet at 127.0.0.1, and Network is unre"),
        ([], {}, "gloo finds no network interface with this node's address; bring the loopback"),
        (
            [],
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29511"}
            | {"MASTER_ADDR": "127.0.0.1"},
            "rank 0 cannot reach 127.0.0.1, where MASTER_ADDR says that the ranks meet",
        ),
    ],
    ids=["launcher", "alone", "rank 0"],
)
def test_without_a_network_ranks_say_so_at_once(
    launched: list[str],
    environment: dict[str, str],
    said: str,
    tiny_shards: Path,
    tmp_path: Path,
) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of users")
    overrides = tiny_overrides(tiny_shards, tmp_path, "run", parallel__timeout_seconds=30)
    command = [*apart, sys.executable, "-m", "pretrain", "train", "demo", *overrides, *launched]
    done = run_program(command, environment)
    assert done.returncode == 2 and f"error: {said}" in done.stderr
    assert len([line for line in done.stderr.splitlines() if "rror" in line]) == 1, done.stderr
