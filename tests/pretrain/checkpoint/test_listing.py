"""The list of checkpoints beside a training, which saves and removes some meanwhile."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from pretrain.checkpoint.listing import list_checkpoints, verified
from pretrain.runs.directory import MARKER, RunDirectory


def test_checkpoints_that_come_and_go_are_no_error(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ended = threading.Event()
    run.checkpoints.mkdir()

    def train() -> None:
        step = 0
        while not ended.is_set():
            step += 1
            path = run.checkpoint(step % 3)
            path.mkdir()
            for name in ("a", "b", MARKER):
                (path / name).write_text("{}")
            shutil.rmtree(path)

    training = threading.Thread(target=train)
    training.start()
    try:
        for _ in range(60):
            for each in list_checkpoints(tmp_path):
                verified(each, print)
    finally:
        ended.set()
        training.join()
