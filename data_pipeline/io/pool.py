"""Pool of worker processes in which no failure of a worker goes unnoticed.

Each worker has its own pipe and nothing is shared, so a worker that is killed cannot leave a lock
behind; the parent sees the pipe close. Another worker takes its place, and its task is tried once
more after the others (for want of memory, perhaps, when fewer are running). Workers end themselves
when the parent is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from data_pipeline.errors import DataError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Progress:
    """Report of a worker: its work since its last report.

    Attributes:
        file: the input file that it is at.
        documents: documents encoded.
        tokens: ids made.
        text_bytes: bytes of text, as UTF-8.
        input_bytes: bytes of the inputs as they lie on disk.
        skipped_bytes: of inputs that were finished before.
        joined_tokens: tokens put into shards.
        tokens_to_join: tokens that will be, reported once.
    """

    file: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    input_bytes: int = 0
    skipped_bytes: int = 0
    joined_tokens: int = 0
    tokens_to_join: int = 0


_Report = Callable[[Progress], None]


# How often a task is tried whose worker dies.
_ATTEMPTS = 2


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    task: int | None = None
    file: str = "its first input"


def run_tasks(
    function: Callable[[_Task, _Report], _Result],
    tasks: list[_Task],
    workers: int,
    report: _Report,
    look: Callable[[_Result], None] = lambda result: None,
) -> list[_Result]:
    """Call function(task, report) for every task.

    With one worker this process does the work. Otherwise workers are spawned, not forked.

    Args:
        function: does a task; it is pickled once for every worker.
        tasks: the tasks.
        workers: how many processes.
        report: called with what the workers report.
        look: called with every result as it comes; an error that it raises ends the run.

    Returns:
        The results, in the order of the tasks.

    Raises:
        DataError: a worker raised it or another error, and the others are stopped. Or workers died
            over a task twice: the others continue to their end, then the message names the input
            files.
    """
    if workers == 1 or len(tasks) < 2:
        results = []
        for task in tasks:
            results.append(function(task, report))
            look(results[-1])
        return results
    return _Pool(function, tasks, min(workers, len(tasks)), report, look=look).run()


@dataclass
class _Pool(Generic[_Task, _Result]):
    function: Callable[[_Task, _Report], _Result]
    tasks: list[_Task]
    count: int
    report: _Report
    look: Callable[[_Result], None]

    def __post_init__(self) -> None:
        self._waiting = deque(range(len(self.tasks)))
        self._deaths: Counter[int] = Counter()
        self._given_up: dict[int, str] = {}
        self._results: dict[int, _Result] = {}
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []

    def run(self) -> list[_Result]:
        try:
            while len(self._results) + len(self._given_up) < len(self.tasks):
                self._fill()
                ready = wait([worker.connection for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.connection in ready]:
                    self._hear(worker)
        finally:
            for worker in self._workers:
                worker.process.terminate()
            for worker in self._workers:
                worker.process.join()
                worker.connection.close()
        if self._given_up:
            raise DataError(
                "; ".join(self._given_up[number] for number in sorted(self._given_up))
                + "; everything else is finished: run the same command again to continue, with "
                "fewer --workers if memory was short"
            )
        return [self._results[number] for number in range(len(self.tasks))]

    def _fill(self) -> None:
        """Give every idle worker a task, and start workers for tasks that are left."""
        for worker in self._workers:
            if worker.task is None and self._waiting:
                self._hand_out(worker)
        while self._waiting and len(self._workers) < self.count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, self.function), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
            self._hand_out(self._workers[-1])

    def _hand_out(self, worker: _Worker) -> None:
        worker.task = self._waiting.popleft()
        # A worker that has just died is found by the next receive, which says how.
        with contextlib.suppress(ConnectionError):
            worker.connection.send(self.tasks[worker.task])

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._bury(worker)
            return
        if kind == "error":
            raise DataError(value)
        if kind == "fault":
            raise DataError(
                f"the worker that was reading {worker.file} failed ({value}); move the file away, "
                "or report this with what --workers 1 says"
            )
        if kind == "progress":
            worker.file = value.file
            self.report(value)
            return
        assert worker.task is not None
        self._results[worker.task], worker.task = value, None
        self.look(value)

    def _bury(self, worker: _Worker) -> None:
        """Remove a worker that is gone; its task goes to the end of the line, or is given up."""
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        number = worker.task
        if number is None:  # between two tasks
            return
        code = worker.process.exitcode or 0
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        self._deaths[number] += 1
        if self._deaths[number] < _ATTEMPTS:
            self._waiting.append(number)
        else:
            self._given_up[number] = (
                f"the worker that was reading {worker.file} {how}, {_ATTEMPTS} times"
            )


def _serve(connection: Connection, function: Callable[[Any, _Report], Any]) -> None:
    """Run a worker: tasks from the pipe until it closes."""
    # Ctrl-C reaches the parent, which stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        except MemoryError:
            raise  # the worker ends, and its task is tried once more
        except Exception as error:
            connection.send(("fault", f"{type(error).__name__}: {error}"))
            return
        connection.send(("result", result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
