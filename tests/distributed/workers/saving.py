"""Rank functions whose saves are killed, slow, refused by the file system, or many."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch.distributed as dist

from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.ranks.signals import StopSignals
from pretrain.training.loop import train
from tests.distributed.workers.runs import of_all_ranks


def killed_at_open(payload: dict[str, Any]) -> str:
    """The rank that first opens a file whose path has `place` in it kills itself.

    Nothing in it goes on.
    """
    _when_opened(payload["place"], lambda: os.kill(os.getpid(), signal.SIGKILL))
    return train(load_config("demo", payload["overrides"]), StopSignals())


def killed_at_size(payload: dict[str, Any]) -> str:
    """The kernel kills the rank at the byte of `file` that would be one more than `bytes`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limits = (payload["bytes"], hard)
    _when_opened(payload["file"], lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    return train(load_config("demo", payload["overrides"]), StopSignals())


def slow_saves(payload: dict[str, Any]) -> str:
    """The file system takes `seconds` to open a rank's file."""
    _when_opened(".safetensors", lambda: time.sleep(payload["seconds"]))
    return train(load_config("demo", payload["overrides"]), StopSignals())


def a_rank_that_does_not_come(payload: dict[str, Any]) -> list[Any]:
    """Rank 1's file system does not answer; what every rank is told, and if it may pass."""
    _when_opened("rank_00001.safetensors", lambda: time.sleep(600))
    try:
        answer = train(load_config("demo", payload["overrides"]), StopSignals())
    except UserError as error:
        answer = (str(error), error.passing)
    return of_all_ranks(answer)


def refused_and_again(payload: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 may write `bytes` a file at most.

    Then the limit is lifted and the same command starts again.

    Returns:
        What each rank was told, what was left in checkpoints/, and the state after the second
        start.
    """
    config = load_config("demo", payload["overrides"])
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (payload["bytes"], old_limits[1]))
    try:
        answer = train(config, StopSignals())
    except UserError as error:
        answer = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
    told = of_all_ranks(answer)
    left = sorted(path.name for path in (config.run_path / "checkpoints").iterdir())
    dist.barrier()
    return {"told": told, "left": left, "state": train(config, StopSignals())}


class Sampling(StopSignals):
    """Looks at this process whenever the loop asks for signals, that is once a step."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []
        self.continue_later = False

    @property
    def stop(self) -> bool:  # type: ignore[override]
        process = psutil.Process()
        self.samples.append((process.num_threads(), process.num_fds()))
        return False


def many_saves(payload: dict[str, Any]) -> list[tuple[int, int]]:
    """(threads, open files) of rank 0 at every step."""
    signals = Sampling()
    train(load_config("demo", payload["overrides"]), signals)
    return signals.samples


def _when_opened(path_part: str, action: Callable[[], None]) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and path_part in str(arguments[0]):
            action()

    sys.addaudithook(hook)
