"""Real ranks (gloo processes) for tests, from a server that has imported torch and the rest once.

    answer = run_ranks(4, "tests.distributed.workers.designs:descents", {"runs": [...]})
    done = train_on_warm_ranks(overrides, ranks=4)
    done = warm_cli(["evaluate", "diversity", run])

The first asks rank 0 for what a function answers, the second runs the program's own `train`, as
`python -m pretrain train demo OVERRIDES --local-ranks 4` would, and the third any verb as one
process that no launcher started. None of them starts a Python interpreter: tests/warm_ranks.py says
how. What is about the start of a process itself (signals, kills, the launcher) starts the real
command: tests/command_line.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parent.parent


def run_ranks(ranks: int, target: str, payload: dict[str, Any], timeout: float = 500) -> Any:
    """Call `module:function(payload)` on `ranks` processes; return what rank 0 did, in JSON."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        arguments = [target, json.dumps(payload), str(result)]
        done = _on_warm_ranks(ranks, "function", arguments, timeout)
        assert done.returncode == 0, (
            f"{target} on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}"
        )
        return json.loads(result.read_text())


def function_on_warm_ranks(
    ranks: int, target: str, payload: dict[str, Any], timeout: float = 500
) -> subprocess.CompletedProcess[str]:
    """The same, of ranks that are to end in their own way: exit code, and what they said."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [target, json.dumps(payload), str(Path(directory) / "result.json")]
        return _on_warm_ranks(ranks, "function", arguments, timeout)


def train_on_warm_ranks(
    overrides: Sequence[str], ranks: int, timeout: float = 500, config: str | Path = "demo"
) -> subprocess.CompletedProcess[str]:
    """The program's `train CONFIG OVERRIDES` on `ranks` processes, to its end."""
    return _on_warm_ranks(ranks, "command", ["train", str(config), *overrides], timeout)


def train_to_end(overrides: Sequence[str], ranks: int) -> subprocess.CompletedProcess[str]:
    """The same of a run that is to end with exit code 0."""
    done = train_on_warm_ranks(overrides, ranks)
    assert done.returncode == 0, done.stderr
    return done


def warm_cli(
    arguments: Sequence[str], timeout: float = 500, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`command_line.cli` for what does not depend on how the process was started."""
    return _on_warm_ranks(
        1, "command", list(arguments), timeout, environment=environment or {}, launched=False
    )


def run_program(
    command: Sequence[object],
    environment: Mapping[str, str] = MappingProxyType({}),
    where: Path = ROOT,
    timeout: float = 500,
) -> subprocess.CompletedProcess[str]:
    """Run a program of its own to its end; `environment` is added to that of a rank."""
    return subprocess.run(
        [*map(str, command)],
        cwd=where,
        env=rank_environment() | dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def rank_environment() -> dict[str, str]:
    """One thread a rank, and no launcher's variables inherited from outside.

    May be called from any thread: pytest's own sets a variable at each test's begin and removes it
    at its end (PYTEST_CURRENT_TEST), so that one may be gone between its name and its value.
    """
    values = {key: os.environ.get(key) for key in os.environ}
    inherited = {
        key: value
        for key, value in values.items()
        if value is not None and not key.startswith(("SLURM_", "TORCHELASTIC"))
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _on_warm_ranks(
    ranks: int,
    kind: str,
    arguments: list[str],
    timeout: float,
    environment: Mapping[str, str] = MappingProxyType({}),
    launched: bool = True,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as job:
        output, errors = (Path(directory) / name for name in ("stdout", "stderr"))
        request = {
            "ranks": ranks,
            "kind": kind,
            "arguments": arguments,
            "environment": rank_environment() | dict(environment),
            "launched": launched,
            "stdout": str(output),
            "stderr": str(errors),
        }
        job.settimeout(timeout)
        job.connect(_server_address())
        job.sendall(json.dumps(request).encode() + b"\n")
        try:
            answer = job.makefile().readline()
        except TimeoutError:
            # Closing the socket ends the ranks.
            raise TimeoutError(
                f"{ranks} ranks did not end within {timeout} s: {arguments}\n"
                f"{output.read_text()}\n{errors.read_text()}"
            ) from None
        assert answer, f"the server of warm ranks is gone: {errors.read_text()}"
        return subprocess.CompletedProcess(
            arguments, int(answer), output.read_text(), errors.read_text()
        )


_starting = threading.Lock()


def _server_address() -> str:
    with _starting:
        return _start_server()


@cache
def _start_server() -> str:
    """Return the socket of the server, which the first process of pytest that needs it starts.

    Who uses the server holds its stdin open, a named pipe; the server ends after the last of them.
    """
    if "PYTEST_XDIST_TESTRUNUID" in os.environ:  # a tree of its own may run pytest within pytest
        name = f"ranks-{os.environ['PYTEST_XDIST_TESTRUNUID']}-{zlib.crc32(bytes(ROOT)):08x}"
        directory = Path(tempfile.gettempdir()) / name
        directory.mkdir(mode=0o700, exist_ok=True)
    else:
        directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    address, users = directory / "socket", directory / "users"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if address.exists():
            os.open(users, os.O_WRONLY | os.O_NONBLOCK)  # closed when this process ends
            return str(address)
        os.mkfifo(users)
        stdin = os.open(users, os.O_RDONLY | os.O_NONBLOCK)
        os.open(users, os.O_WRONLY)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_ranks", str(address)],
            cwd=ROOT,
            env=rank_environment(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(stdin)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", "the server of warm ranks did not start"
        # It may outlive this process, and Python warns of one that nobody holds.
        _SERVERS.append(server)
    return str(address)


_SERVERS: list[subprocess.Popen[str]] = []
