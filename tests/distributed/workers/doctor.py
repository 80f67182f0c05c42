"""Rank functions of test_doctor.py: the command on each rank, as on a node of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import TCPStore

PATIENCE = timedelta(seconds=200)


def on_nodes(payload: dict[str, Any]) -> NoReturn:
    """Run `python -m pretrain doctor` on every rank.

    Its output and exit code go to files in `directory`.

    Args:
        payload: "ranks": for each rank its node, directory and arguments; "environment": of all
            ranks.
    """
    from pretrain.__main__ import main

    rank = int(os.environ["RANK"])
    settings = payload["ranks"][rank]
    os.environ |= {**payload["environment"], "SLURMD_NODENAME": settings["node"], "LOCAL_RANK": "0"}
    os.chdir(settings["directory"])
    directory = Path(payload["directory"])
    output = os.open(directory / f"output_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    end = os._exit

    def note_and_end(code: int) -> NoReturn:
        (directory / f"code_{rank}").write_text(str(code))
        end(code)

    os._exit = note_and_end  # type: ignore[assignment]  # with which the command ends
    report = ["--report", str(directory / "report.json")]
    sys.argv = ["pretrain", "doctor", "demo", *settings["arguments"], *report]
    main()
    raise AssertionError("the command came back")


def with_a_silent_and_an_absent_rank(payload: dict[str, Any]) -> None:
    """As `on_nodes`, but rank 1 stops once it has said hello, before rank 0 comes.

    Rank 2 never comes.
    """
    rank = int(os.environ["RANK"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=PATIENCE)
    store.set(f"test/process/{rank}", str(os.getpid()))
    if rank < 2:
        if rank == 0:
            store.wait(["test/silent"], PATIENCE)
        on_nodes(payload)
    first, silent = (int(store.get(f"test/process/{other}")) for other in (0, 1))
    store.wait(["doctor/0/hello/1"], PATIENCE)
    os.kill(silent, signal.SIGSTOP)  # as a node that hangs
    store.set("test/silent", "yes")
    with suppress(ProcessLookupError):
        while True:
            os.kill(first, 0)
            time.sleep(0.02)
    os.kill(silent, signal.SIGKILL)
