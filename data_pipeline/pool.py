"""Tasks over worker processes, such that no failure of a worker goes unnoticed.

Each worker has its own pipe and nothing is shared, so a worker that is killed cannot leave a lock behind;
the parent sees the pipe close and stops the run. Workers end themselves when the parent is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from data_pipeline.errors import DataError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Progress:
    """What a worker did since its last word, and the input file it is at.

    input_bytes: of the inputs as they lie on disk; skipped_bytes: of inputs that were finished before.
    """

    file: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    input_bytes: int = 0
    skipped_bytes: int = 0

    def at(self, file: str, input_bytes: int) -> Progress:
        """The same work, with the place it got to."""
        return replace(self, file=file, input_bytes=input_bytes)


_Report = Callable[[Progress], None]


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    task: int = -1
    file: str = "its first input"


def run_tasks(
    function: Callable[[_Task, _Report], _Result], tasks: list[_Task], workers: int, report: _Report
) -> list[_Result]:
    """function(task, report) for every task; results in the order of the tasks.

    One worker means this process. `function` is pickled once for every worker (they are spawned, not forked).

    Raises:
        DataError: a worker raised it or died, and the message names the input file. The other workers are
            stopped first.
    """
    if workers == 1 or len(tasks) < 2:
        return [function(task, report) for task in tasks]
    results: dict[int, _Result] = {}
    waiting = list(range(len(tasks)))
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    try:
        for _ in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()
            pool.append(_Worker(process, ours))
            _hand_out(pool[-1], waiting, tasks)
        while len(results) < len(tasks):
            ready = wait([worker.connection for worker in pool])
            for worker in [worker for worker in pool if worker.connection in ready]:
                kind, value = _receive(worker)
                if kind == "error":
                    raise DataError(value)
                if kind == "progress":
                    worker.file = value.file
                    report(value)
                else:
                    results[worker.task] = value
                    _hand_out(worker, waiting, tasks)
    finally:
        for worker in pool:
            worker.process.terminate()
        for worker in pool:
            worker.process.join()
            worker.connection.close()
    return [results[number] for number in range(len(tasks))]


def _hand_out(worker: _Worker, waiting: list[int], tasks: list[_Task]) -> None:
    if waiting:
        worker.task = waiting.pop(0)
        # A worker that has just died is found by the next receive, which says how.
        with contextlib.suppress(ConnectionError):
            worker.connection.send(tasks[worker.task])


def _receive(worker: _Worker) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = worker.connection.recv()
        return message
    except (EOFError, ConnectionError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise DataError(
            f"the worker that was reading {worker.file} {how}; finished shards are kept: "
            f"run the same command again to continue"
        ) from None


def _serve(connection: Connection, function: Callable[[Any, _Report], Any]) -> None:
    """A worker's life: tasks from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops the workers.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            result = function(task, lambda progress: connection.send(("progress", progress)))
        except DataError as error:
            connection.send(("error", str(error)))
            return
        connection.send(("result", result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
