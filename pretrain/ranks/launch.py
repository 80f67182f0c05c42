"""Start of the ranks of one machine: `python -m pretrain train CONFIG --local-ranks N`.

On a cluster srun starts the ranks and this file is not used. On one machine torchrun works too, but
SIGUSR1 kills it, and it replaces a rank's exit code and message by its own report. This launcher
forwards signals, ends all ranks when one fails, and returns that rank's exit code.
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

from pretrain.errors import UserError
from pretrain.ranks.cores import usable_cores
from pretrain.ranks.signals import handle_requests

HERE = "127.0.0.1"
GRACE_SECONDS = 15.0
"""Seconds in which the other ranks may end by themselves after one failed."""
HASTE_SECONDS = 5.0
"""Seconds until ranks are killed after a second Ctrl-C; a hanging collective ignores signals."""
SENT_BY_THE_KERNEL = {
    signal.SIGKILL: "the kernel sends it when memory is full (`dmesg` says so)",
    signal.SIGBUS: "the kernel sends it when a file that is being read was cut short or its disk "
    "fails (`python -m data_pipeline verify DIRECTORY` reads shards), or when /dev/shm is full",
    signal.SIGSEGV: "a library has crashed",
}
"""{a signal that ends one rank, so that the others fail for it: what it usually means}"""


def launch_local_ranks(command: Sequence[str], ranks: int) -> int:
    """Start a command once per rank, with torchrun's variables, and wait for all of them.

    Signals that ask for an end are forwarded to every rank; a second Ctrl-C leaves them
    `HASTE_SECONDS`. If this process is killed, the kernel kills the ranks.

    Returns:
        0 if every rank ended with 0, else the exit code of the first rank that failed. For a rank
        that a signal ended it is 128 + the signal's number, and this process prints the signal,
        because the rank cannot.
    """
    from torch.distributed import TCPStore

    _require_loopback()
    # The store lives in this process, so no other process can take its port in between. A port that
    # the store opened itself would listen on all addresses.
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
    started = _Ranks()
    earlier_handlers = handle_requests(started.forward)
    try:
        for rank in range(ranks):
            variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(list(command), env=variables, preexec_fn=prepare_child)
            started.add(process)
        return started.wait()
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _require_loopback() -> None:
    """Refuse a machine on which processes cannot reach each other; torch would try for minutes.

    Raises:
        UserError: a connection to HERE fails.
    """
    try:
        with socket.create_server((HERE, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=GRACE_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"ranks of one machine meet at {HERE}, and {error.strerror or error}: bring the "
            "loopback device up (`ip link set lo up`), or start without --local-ranks"
        ) from error


class _Ranks:
    """The processes of the ranks, and how often a person has asked for their end."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._interrupts: list[float] = []
        self._asked: int | None = None

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Add a started process; a signal that came before is forwarded to it too."""
        self.processes.append(process)
        if self._asked is not None:
            process.send_signal(self._asked)

    def forward(self, number: int, _frame: object) -> None:
        """Forward a signal to the running ranks, and to those that start later."""
        self._asked = number
        for process in self._running:
            process.send_signal(number)
        if number == signal.SIGINT:
            self._interrupts.append(time.monotonic())

    @property
    def _overdue(self) -> bool:
        """Return whether the second Ctrl-C was more than HASTE_SECONDS ago."""
        second = self._interrupts[1:2]
        return bool(second) and time.monotonic() > second[0] + HASTE_SECONDS

    @property
    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]

    @property
    def _failed(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() not in (None, 0)]

    def wait(self) -> int:
        """Return the exit code of all ranks; end the others if one fails, or a person insists."""
        while self._running and not (self._overdue or self._failed):
            time.sleep(0.05)
        failed = self._failed
        grace = time.monotonic() + GRACE_SECONDS  # the others may be failing for the same reason
        while failed and self._running and not self._overdue and time.monotonic() < grace:
            time.sleep(0.05)
        failed = failed or self._failed
        late = [str(self.processes.index(process)) for process in self._running]
        if self._overdue and late:
            code = 128 + signal.SIGINT
            message = f"killed rank {', '.join(late)}, which did not end after Ctrl-C"
            print(message, file=sys.stderr, flush=True)
        elif failed:
            code = self._exit_code(failed)
        else:
            return 0
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            # A process that waits for a dead file system does not end.
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        return code

    def _exit_code(self, failed: list[subprocess.Popen[bytes]]) -> int:
        """Return the exit code for ranks of which some failed; print the signal that ended one."""
        # Such a rank is the cause: it cannot have failed because of the others.
        causes = [rank for rank in self.processes if -(rank.poll() or 0) in SENT_BY_THE_KERNEL]
        first = (causes or failed)[0]
        if first.returncode >= 0:
            return first.returncode
        number = -first.returncode
        rank = self.processes.index(first)
        message = f"rank {rank} was ended by signal {number} ({signal.strsignal(number)})"
        if number in SENT_BY_THE_KERNEL:
            message += f"; {SENT_BY_THE_KERNEL[signal.Signals(number)]}"
        print(message, file=sys.stderr, flush=True)
        return 128 + number


def prepare_child() -> None:
    """Ask the kernel, in the child before exec, for SIGKILL when the parent dies (Linux).

    The child gets its own process group, so that a terminal's Ctrl-C reaches it only once, from the
    parent.
    """
    os.setpgrp()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
