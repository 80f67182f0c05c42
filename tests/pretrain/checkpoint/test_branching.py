"""Checkpoints of a trunk from which a branch may start, as the trunk's files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.branching import branch_points
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory
from tests.fabricated_checkpoints import bare_checkpoint

BASE = ["schedule.kind=wsd", "schedule.steps=40"]
DECAY = "optimizer.weight_decay"
OTHER = {DECAY: {"was": 0.01, "is": 0.5}}
BACK = {DECAY: {"was": 0.5, "is": 0.01}}


def trunk(directory: Path, starts: list[tuple[int, dict[str, Any]]]) -> RunDirectory:
    """A trunk with a checkpoint of step 10, and these starts: (first step, changes)."""
    run = RunDirectory(directory)
    run.config.write_text(load_config("demo", BASE).to_yaml())
    segments = [{"first_step": step, "changes": changes} for step, changes in starts]
    run.environment.write_text(json.dumps({"world_size": 1, "segments": segments}))
    run.metrics.touch()
    bare_checkpoint(run, 10)
    return run


def points_in(run: RunDirectory) -> list[Path]:
    return branch_points(resolve(load_config("demo", BASE), 2), run, {"keys": {}})


def test_a_start_of_the_trunk_that_trained_nothing_of_it_does_not_count(tmp_path: Path) -> None:
    run = trunk(tmp_path, [(1, {}), (11, OTHER), (11, BACK)])
    assert points_in(run) == [run.checkpoint(10)]


def test_a_trunk_without_its_records_is_refused(tmp_path: Path) -> None:
    run = trunk(tmp_path, [(1, {})])
    run.metrics.unlink()
    with pytest.raises(UserError, match=f"{tmp_path}: {run.metrics} is missing; restore"):
        points_in(run)


def test_a_value_that_the_trunk_was_trained_with_for_a_while_counts(tmp_path: Path) -> None:
    run = trunk(tmp_path, [(1, {}), (6, OTHER), (11, BACK)])
    with pytest.raises(UserError, match=f"{DECAY} changed at step 6; branch from a run that kept"):
        points_in(run)
