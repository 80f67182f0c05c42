"""The list of checkpoints beside a training, which saves and removes some meanwhile."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from pretrain.checkpoint.listing import State, list_checkpoints, verified
from pretrain.runs.directory import GOOD, MARKER, RunDirectory


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
            for checkpoint in list_checkpoints(tmp_path):
                verified(checkpoint, print)
        assert training.is_alive()
    finally:
        ended.set()
        training.join()


def test_a_checkpoint_that_was_good_and_has_lost_files_is_damaged(tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).checkpoint(3)
    path.mkdir(parents=True)
    (listed,) = list_checkpoints(tmp_path)
    assert listed.state is State.UNFINISHED and not listed.belongs_to_run
    (path / GOOD).touch()
    (listed,) = list_checkpoints(tmp_path)
    assert listed.state is State.DAMAGED and listed.belongs_to_run
    assert listed.problems == (f"{path / 'checkpoint.json'} is missing",)
