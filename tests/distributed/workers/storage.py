"""Rank functions of test_storage.py: train, with no room left from a certain moment on."""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.ranks.signals import StopSignals
from pretrain.training.loop import run_steps
from pretrain.training.open_run import Run, open_run


def on_a_full_disk(payload: dict[str, Any]) -> None:
    """Fill the disk before the second checkpoint, a record after step 2 or the end is written.

    The second checkpoint finds room for its larger half: of two ranks one can write its part.
    """
    filler = Path(payload["filler"])
    moments = {"save": "the checkpoint of step 8", "record": "step 2, its update"}
    try:
        with open_run(load_config("demo", payload["overrides"])) as run:
            told = run.watch.at

            def at(stage: str) -> None:
                told(stage)
                if stage == moments.get(payload["moment"]):
                    leave = _larger_half(run) if payload["moment"] == "save" else 0
                    if run.context.is_first:
                        _fill(filler, leave)
                    dist.barrier()  # now it is full for all

            run.watch.at = at  # type: ignore[method-assign]
            state = run_steps(run, StopSignals())
            if payload["moment"] == "close":
                _fill(filler, leave=0)
            run.close(state)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _larger_half(run: Run) -> int:
    """Bytes: two thirds of the newest checkpoint."""
    run.checkpoints.wait()
    newest = run.resolved.directory.newest_checkpoint()
    assert newest is not None
    return 2 * sum(file.stat().st_size for file in newest.iterdir()) // 3


def _fill(filler: Path, leave: int) -> None:
    """Write until nothing more is taken, then give back so many bytes, in whole blocks of 4096."""
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(filler.stat().st_size - leave)
