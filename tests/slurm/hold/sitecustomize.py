"""For drills and resumes, through PYTHONPATH.

A program stops where a test wants to catch it, on any machine.

HOLD_AT=3,5: rank 0 of a job's first segment waits before step 3, that of its second before step 5,
until a signal asks the run to stop; the other ranks are then in the middle of that step. KILL_AT=3:
in every segment rank 1 kills itself there, once the checkpoint of step 2 counts. HOLD_TASK=1: task
1 of a tokenize array, in its first life, waits before it writes.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Wrap:
    """Finds `pretrain.training.loop` as usual, and puts `held` around its train_step."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "pretrain.training.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            module.train_step = held(module.train_step)

        spec.loader.exec_module = execute_and_wrap
        return spec


def held(train_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(run: Any, progress: Any, signals: Any) -> Any:
        number = progress.step + 1
        rank = os.environ.get("SLURM_PROCID") or os.environ.get("RANK", "0")
        if rank == "0" and number == hold_at():
            while not (signals.stop or signals.continue_later):
                time.sleep(0.02)
        if rank == "1" and number == int(os.environ.get("KILL_AT", "0")):
            wait_for(run.config.run_path / f"checkpoints/step_{number - 1:08d}/COMPLETE")
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(run, progress, signals)

    return step


def wait_for(path: Path, seconds: float = 120.0) -> None:
    """Wait for a file that is written in the background of training."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not there within {seconds:.0f} s")
        time.sleep(0.02)


def hold_at() -> int | None:
    steps = [int(word) for word in os.environ.get("HOLD_AT", "").split(",") if word]
    segment = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return steps[segment] if segment < len(steps) else None


def hold_task(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and "/units/" in str(arguments[0]):
        while True:
            time.sleep(1)


if "HOLD_AT" in os.environ or "KILL_AT" in os.environ:
    sys.meta_path.insert(0, Wrap())
this_task = os.environ.get("HOLD_TASK") == os.environ.get("SLURM_ARRAY_TASK_ID", "none")
first_life = "SLURM_RESTART_COUNT" not in os.environ
if this_task and first_life and "data_pipeline" in sys.orig_argv:
    sys.addaudithook(hold_task)
