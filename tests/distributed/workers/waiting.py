"""Rank functions of test_waiting.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from data_pipeline.io import lease
from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.ranks import watch as watch_module
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.groups import ParallelContext, initialize_distributed, shutdown_distributed
from pretrain.ranks.signals import StopSignals
from pretrain.ranks.watch import Watch, end_process, others_waiting, watching
from pretrain.training import loop
from pretrain.training.loop import run_steps, train_step
from pretrain.training.open_run import open_run


@contextmanager
def _watched(
    payload: dict[str, Any], tensor_parallel_size: int = 1
) -> Iterator[tuple[ParallelContext, Watch]]:
    """Process groups and a watch with the `timeout` of the payload, which may say what `held`."""
    launch = LaunchEnvironment.read()
    timeout = payload["timeout"]
    context = initialize_distributed(launch, tensor_parallel_size, timeout_seconds=timeout)
    with watching(launch, timeout, lambda: payload.get("held", "")) as watch:
        yield context, watch


def one_is_busy(payload: dict[str, Any]) -> None:
    """Rank 1 lives, and does not come to a sum; the ranks end there."""
    with _watched(payload, tensor_parallel_size=2) as (context, watch):
        watch.at("reading a slow disk")
        time.sleep(10 * payload["timeout"] * context.rank)
        watch.at("the sum of all")
        dist.all_reduce(torch.ones(1), group=context.tensor_parallel_group)


def all_read_a_pipe(payload: dict[str, Any]) -> None:
    """Every rank reads a file that never answers, or rank 0 does and the others wait for it."""
    with _watched(payload) as (context, watch):
        watch.at("finding the newest checkpoint")
        if context.rank in payload["readers"]:
            Path(payload["pipe"]).read_bytes()
        dist.barrier()


def rank_0_works_long(payload: dict[str, Any]) -> float:
    """Rank 0 works for longer than a collective may wait; the seconds until all have met again."""
    started = time.monotonic()
    with _watched(payload) as (context, watch), others_waiting(context, watch):
        end = started + payload["seconds"]
        while context.is_first and time.monotonic() < end:
            sum(range(100_000))
            time.sleep(0.02)
    dist.barrier()
    shutdown_distributed(context)
    return time.monotonic() - started


def rank_0_hangs_at_work(payload: dict[str, Any]) -> None:
    """Rank 0 reads a file that never answers, in work for which rank 1 waits."""
    with _watched(payload) as (context, watch), others_waiting(context, watch):
        watch.at("the order of the samples")
        if context.is_first:
            Path(payload["pipe"]).read_bytes()


def two_end(payload: dict[str, Any]) -> None:
    """Rank 1's save waits in vain, then rank 0's collective.

    Both would end, and go on here to be heard.
    """
    launch = LaunchEnvironment.read()
    context = initialize_distributed(launch, 2, timeout_seconds=60)
    watch_module.os = SimpleNamespace(_exit=lambda code: None)  # type: ignore[attr-defined]
    with watching(launch, 60) as watch:
        if launch.rank == 1:
            end_process("of a save")
        dist.barrier(group=context.tensor_parallel_group)
        if launch.rank == 0:
            watch._end("of a collective")


def loses_its_lock(payload: dict[str, Any]) -> str:
    """Another process takes the lock after the first step, as if this one had been suspended."""
    lease.RENEWED_EVERY = 0.02
    signals = StopSignals()
    try:
        with open_run(load_config("demo", payload["overrides"])) as run:
            train_step(run, run.position, signals)
            if run.lock is not None:
                (run.config.run_path / "lock").write_text(payload["holder"])
                while run.lock.lost is None:
                    time.sleep(0.01)
            run_steps(run, signals)
    except UserError as error:
        return str(error)
    return "it went on"


def loses_its_lock_in_a_step(payload: dict[str, Any]) -> str:
    """Another process takes the lock when a step's flags are known: a suspension may come there.

    The time since the last look at the lock is made to count as long.
    """
    lease.CONFIRMED_FOR = 0.0
    signals = StopSignals()

    def train_and_sleep(run: Any, *arguments: Any) -> Any:
        result = train_step(run, *arguments)
        if run.lock is not None:
            (run.config.run_path / "lock").write_text(payload["holder"])
        return result

    loop.train_step = train_and_sleep
    try:
        with open_run(load_config("demo", payload["overrides"])) as run:
            run_steps(run, signals)
    except UserError as error:
        return str(error)
    finally:
        loop.train_step = train_step
    return "it went on"


def timeouts(payload: dict[str, Any]) -> list[list[float]]:
    """For each of `timeouts`: those of all groups that were made for it, in seconds."""
    limits = []
    for seconds in payload["timeouts"]:
        context = initialize_distributed(LaunchEnvironment.read(), 1, timeout_seconds=seconds)
        backends = [
            group._get_backend(torch.device("cpu"))
            for group in set(_world.pg_map) - context.earlier_groups
        ]
        limits.append(sorted({backend.options._timeout.total_seconds() for backend in backends}))
        shutdown_distributed(context)
    return limits
