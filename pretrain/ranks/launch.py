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


def launch_local_ranks(command: Sequence[str], ranks: int) -> int:
    """Start a command once per rank, with torchrun's variables, and wait for all of them.

    Signals that ask for an end are passed on to every rank. If this process is killed, the kernel
    kills the ranks. Returns 0 if every rank ended with 0, else the exit code of the first rank that
    failed; 128 + the signal's number for a rank that a signal ended, which is told: the rank itself
    cannot.

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
    _forward_signals(processes)
    for rank in range(ranks):
        processes.append(
            subprocess.Popen(
                list(command),
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                preexec_fn=prepare_child,
            )
        )
    return _wait(processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while not _failed(processes) and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    failed = _failed(processes)
    if not failed:
        return 0
    _let_end(processes)
    # A rank that was killed did not fail for the others, whoever was seen first.
    killed = [process for process in processes if process.poll() == -signal.SIGKILL]
    first = (killed or failed)[0]
    if first.returncode < 0:
        number = -first.returncode
        rank = processes.index(first)
        said = f"rank {rank} was ended by signal {number} ({signal.strsignal(number)})"
        print(said, file=sys.stderr, flush=True)
    for process in processes:
        if process.poll() is None:
            process.kill()
        with suppress(
            subprocess.TimeoutExpired
        ):  # one that waits for a dead file system does not end
            process.wait(GRACE_SECONDS)
    return 128 - first.returncode if first.returncode < 0 else first.returncode


def _failed(processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in processes if process.poll() not in (None, 0)]


def _let_end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Give the other ranks a moment after one is gone; they may be failing alike."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)


def _forward_signals(processes: list[subprocess.Popen[bytes]]) -> None:
    def forward(number: int, _frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    handle_requests(forward)


def prepare_child() -> None:
    """Ask the kernel, in the child before exec, for SIGKILL when the parent dies (Linux).

    In a process group of its own the child gets a terminal's Ctrl-C once, from the parent, and not
    also directly.
    """
    os.setpgrp()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
