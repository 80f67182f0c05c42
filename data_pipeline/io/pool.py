"""Pool of worker processes in which no failure of a worker goes unnoticed.

Each worker has its own pipe and shares nothing else, so a killed worker leaves no lock behind. The
parent sees the pipe close, starts another worker, and retries the task once after all others: if
memory was short, fewer workers are running then. Workers end themselves when the parent is gone.
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
    """Report of the work that a worker did since its last report.

    Attributes:
        file: Input file being read.
        documents: Documents encoded.
        tokens: Ids produced.
        text_bytes: Bytes of text, as UTF-8.
        input_bytes: Bytes of the inputs as stored on disk.
        skipped_bytes: Bytes of inputs that an earlier run had finished.
        joined_tokens: Tokens written to shards.
        tokens_to_join: Tokens that will be written to shards, reported once.
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


# Attempts at a task whose worker dies.
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
        function: Work on one task; pickled once for every worker.
        report: Callback for the workers' reports.
        look: Callback for each result as it arrives; an error that it raises ends the run.

    Returns:
        The results, in the order of the tasks.

    Raises:
        DataError: If a worker raises any error; the other workers are stopped. Also if workers died
            twice over a task; the other tasks are finished first, and the message names the input
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
                    self._receive(worker)
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
            # Only the worker may hold this end, or the pipe would stay open after its death.
            theirs.close()
            self._workers.append(_Worker(process, ours))
            self._hand_out(self._workers[-1])

    def _hand_out(self, worker: _Worker) -> None:
        worker.task = self._waiting.popleft()
        # If the worker has just died, the next receive notices and says how.
        with contextlib.suppress(ConnectionError):
            worker.connection.send(self.tasks[worker.task])

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._remove_dead(worker)
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

    def _remove_dead(self, worker: _Worker) -> None:
        """Remove a dead worker; put its task at the end of the queue, or give it up."""
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        number = worker.task
        if number is None:  # between two tasks
            return
        code = worker.process.exitcode or 0
        cause = f"ended with exit code {code}"
        if code < 0:
            cause = f"was ended by {signal.Signals(-code).name}"
        self._deaths[number] += 1
        if self._deaths[number] < _ATTEMPTS:
            self._waiting.append(number)
        else:
            self._given_up[number] = (
                f"the worker that was reading {worker.file} {cause}, {_ATTEMPTS} times"
            )


def _serve(connection: Connection, function: Callable[[Any, _Report], Any]) -> None:
    """Work on tasks from the pipe until it closes."""
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
            raise  # ends this worker, so that the task is tried once more
        except Exception as error:
            connection.send(("fault", f"{type(error).__name__}: {error}"))
            return
        connection.send(("result", result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
