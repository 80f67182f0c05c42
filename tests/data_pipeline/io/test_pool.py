"""Workers that end, however they end: the input is named."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.pool import Progress, run_tasks

pytestmark = pytest.mark.distributed


def work(task: str, report: Callable[[Progress], None]) -> str:
    """What a worker does with a task of this name."""
    report(Progress(f"{task}.jsonl"))
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
        ("exit0", "ended with exit code 0, 2 times; every"),
        ("exit7", "ended with exit code 7, 2 times; every"),
        ("bug", r"failed \(KeyError: 'not a DataError'\); move the file away, or report"),
    ],
)
def test_no_way_to_end_goes_unnoticed(last: str, how: str) -> None:
    with pytest.raises(DataError, match=rf"worker that was reading {last}\.jsonl {how}"):
        run_tasks(work, ["a", "b", "c", last], 2, lambda progress: None)
