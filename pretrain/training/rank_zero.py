"""Collectives in which rank 0 acts and the others wait: locking the run, reading, writing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from data_pipeline.errors import DataError
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext, agree
from pretrain.ranks.watch import Watch, others_waiting
from pretrain.runs.lock import PAUSE, RunLock
from pretrain.runs.storage import OF_THE_STORAGE, storage_sentence


def lock_run(run: Path, context: ParallelContext, watch: Watch) -> RunLock | None:
    """Lock the run directory on rank 0 (collective); None on the other ranks.

    Raises UserError: on every rank: another process is training the run.
    """
    lock = RunLock(run)
    waiting = False
    while True:
        watch.at("the lock of the run directory")
        refused = False
        with rank_zero_acting(context, watch):
            refused = context.is_first and not lock.take()
        if agree([float(refused)], context.device)[0] == 0:
            return lock if context.is_first else None
        if context.is_first and not waiting:
            print(lock.waited_for, file=sys.stderr, flush=True)
        waiting = True
        time.sleep(PAUSE)


@contextmanager
def rank_zero_acting(
    context: ParallelContext, watch: Watch, place: Path = Path()
) -> Iterator[None]:
    """Raise on every rank what the user must fix and rank 0 meets in the block (collective).

    The others wait meanwhile. `place`: the directory that rank 0 writes to, for errors that do not
    name a file.
    """
    failure: list[Exception | None] = [None]
    try:
        with others_waiting(context, watch):
            yield
    except (UserError, DataError) as error:
        failure = [error]
    except OSError as error:
        sentence = f"rank 0 cannot use {error.filename} ({error.strerror})"
        sentence += "; check run.directory and data.directory"
        if error.errno in OF_THE_STORAGE or error.filename is None:
            sentence = storage_sentence(error, place)
        failure = [UserError(sentence)]
    dist.broadcast_object_list(failure, src=0, device=context.device)
    if failure[0] is not None:
        raise failure[0]
