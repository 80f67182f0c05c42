"""A single process without other ranks, as trained models are evaluated and exported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.groups import ParallelContext, initialize_distributed, shutdown_distributed

ONE_PROCESS = ("parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false")
"""Overrides of a run's config that build its model in one process, whatever layout trained it."""


@contextmanager
def one_process() -> Iterator[ParallelContext]:
    """Make process groups of this process alone, as `build_model` needs them.

    The environment is afterwards what it was: a rank's variables would tell other libraries
    (accelerate, say) that they too are one of several processes.
    """
    before = dict(os.environ)
    alone = LaunchEnvironment(rank=0, local_rank=0, world_size=1)
    context = initialize_distributed(alone, tensor_parallel_size=1, timeout_seconds=600)
    try:
        yield context
    finally:
        shutdown_distributed(context)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
