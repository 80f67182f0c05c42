"""Start of the ranks of one machine: `python -m pretrain train CONFIG --local-ranks N`.

On a cluster srun starts the ranks and this file is not used. On one machine torchrun works too, but
it dies of SIGUSR1 and replaces a rank's exit code and message by its own report; this launcher
passes signals on, ends all ranks when one fails, and returns that rank's exit code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from pretrain.ranks.cores import usable_cores
from pretrain.ranks.signals import handle_requests

HERE = "127.0.0.1"
GRACE_SECONDS = 15.0
"""Seconds for the other ranks to end by themselves after one failed."""
HASTE_SECONDS = 5.0
"""Seconds for all of them after a second Ctrl-C: one that hangs in a collective hears nothing."""


def launch_local_ranks(command: Sequence[str], ranks: int) -> int:
    """Start a command once per rank, with torchrun's variables, and wait for all of them.

    Signals that ask for an end are passed on to every rank; a second Ctrl-C leaves them
    `HASTE_SECONDS`. If this process is killed, the kernel kills the ranks. Returns 0 if every rank
    ended with 0, else the exit code of the first rank that failed; 128 + the signal's number for a
    rank that a signal ended, which is told: the rank itself cannot.

    Args:
        command: the program and its arguments.
        ranks: how many to start.
    """
    from torch.distributed import TCPStore

    # The store lives here, so no other process can take its port in between. A port that it opened
    # itself would listen on all addresses.
    listener = socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    environment = os.environ | {
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    processes: list[subprocess.Popen[bytes]] = []
    requests = _Requests(processes)
    before = handle_requests(requests.forward)
    try:
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    list(command),
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    preexec_fn=prepare_child,
                )
            )
        return _wait(processes, requests)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _Requests:
    """Signals that ask for an end, passed on to the ranks.

    Args:
        processes: the ranks.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._interrupts: list[float] = []

    def forward(self, number: int, _frame: object) -> None:
        """Pass a signal on."""
        for process in _running(self._processes):
            process.send_signal(number)
        if number == signal.SIGINT:
            self._interrupts.append(time.monotonic())

    @property
    def overdue(self) -> bool:
        """Return True if the second Ctrl-C was a while ago."""
        second = self._interrupts[1:2]
        return bool(second) and time.monotonic() > second[0] + HASTE_SECONDS


def _wait(processes: list[subprocess.Popen[bytes]], requests: _Requests) -> int:
    while not (requests.overdue or _failed(processes)) and _running(processes):
        time.sleep(0.05)
    failed = _failed(processes)
    grace = time.monotonic() + GRACE_SECONDS  # the others may be failing alike
    while failed and time.monotonic() < grace and not requests.overdue and _running(processes):
        time.sleep(0.05)
    failed = failed or _failed(processes)
    late = [str(processes.index(process)) for process in _running(processes)]
    if requests.overdue and late:
        code = 128 + signal.SIGINT
        said = f"killed rank {', '.join(late)}, which did not end after Ctrl-C"
        print(said, file=sys.stderr, flush=True)
    elif failed:
        code = _told_code(processes, failed)
    else:
        return 0
    for process in processes:
        if process.poll() is None:
            process.kill()
        # One that waits for a dead file system does not end.
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    return code


def _told_code(
    processes: list[subprocess.Popen[bytes]], failed: list[subprocess.Popen[bytes]]
) -> int:
    """Return the exit code for ranks of which some have failed, and tell of a signal."""
    # A rank that was killed did not fail for the others, whoever was seen first.
    killed = [process for process in processes if process.poll() == -signal.SIGKILL]
    first = (killed or failed)[0]
    if first.returncode >= 0:
        return first.returncode
    number = -first.returncode
    rank = processes.index(first)
    said = f"rank {rank} was ended by signal {number} ({signal.strsignal(number)})"
    print(said, file=sys.stderr, flush=True)
    return 128 + number


def _failed(processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in processes if process.poll() not in (None, 0)]


def _running(processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in processes if process.poll() is None]


def prepare_child() -> None:
    """Ask the kernel, in the child before exec, for SIGKILL when the parent dies (Linux).

    In a process group of its own the child gets a terminal's Ctrl-C once, from the parent, and not
    also directly.
    """
    os.setpgrp()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
