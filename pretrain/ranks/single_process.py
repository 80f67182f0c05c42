"""Process groups of a single process, in which trained models are evaluated and exported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.groups import ParallelContext, initialize_distributed, shutdown_distributed

ONE_PROCESS = ("parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false")
"""Overrides of a run's config that build its model in one process, for any trained layout."""


@contextmanager
def one_process() -> Iterator[ParallelContext]:
    """Create process groups of this process alone, for `build_model`.

    The environment is restored afterwards: a rank's variables would make other libraries
    (accelerate, say) take this process for one of several.
    """
    earlier_environment = dict(os.environ)
    alone = LaunchEnvironment(rank=0, local_rank=0, world_size=1)
    context = initialize_distributed(alone, tensor_parallel_size=1, timeout_seconds=600)
    try:
        yield context
    finally:
        shutdown_distributed(context)
        for name in os.environ.keys() - earlier_environment.keys():
            del os.environ[name]
        os.environ.update(earlier_environment)
