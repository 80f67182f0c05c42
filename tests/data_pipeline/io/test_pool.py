"""Workers that end, however they end: the input is named.

Every worker imports this module, which therefore imports little.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.pool import Progress, run_tasks

pytestmark = pytest.mark.distributed


def work(task: str, report: Callable[[Progress], None]) -> str:
    """What a worker does with a task of this name."""
    report(Progress(f"{task}.jsonl"))
    if task.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if task.startswith("once "):  # PATH: killed at its first sight
        with suppress(FileExistsError):
            Path(task.removeprefix("once ")).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    if task.startswith("exit"):
        os._exit(int(task.removeprefix("exit")))
    if task == "bug":
        raise KeyError("not a DataError")
    return task.upper()


def test_results_are_in_the_order_of_the_tasks() -> None:
    seen: list[str] = []
    tasks = [f"task {number}" for number in range(20)]
    assert run_tasks(work, tasks, 2, lambda progress: seen.append(progress.file)) == [
        t.upper() for t in tasks
    ]
    assert sorted(seen) == sorted(f"{task}.jsonl" for task in tasks)


@pytest.mark.parametrize(
    ("last", "how"),
    [
        ("killed", "was ended by SIGKILL, 2 times; every"),
        ("exit0", "ended with exit code 0, 2 times; every"),
        ("exit7", "ended with exit code 7, 2 times; every"),
        ("bug", r"failed \(KeyError: 'not a DataError'\); move the file away, or report"),
    ],
)
def test_no_way_to_end_goes_unnoticed(last: str, how: str) -> None:
    done: list[str] = []
    with pytest.raises(DataError, match=rf"worker that was reading {last}\.jsonl {how}"):
        run_tasks(work, ["a", "b", "c", last], 2, print, look=done.append)
    assert last == "bug" or sorted(done) == ["A", "B", "C"]  # the others continue


def test_a_worker_that_dies_costs_its_task_a_retry(tmp_path: Path) -> None:
    tasks = ["a", f"once {tmp_path}/x", "b", f"once {tmp_path}/y", "c"]
    assert run_tasks(work, tasks, 2, print) == [task.upper() for task in tasks]
