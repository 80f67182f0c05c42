"""The lock of a run directory, in real trainings."""

import json
from pathlib import Path

import pytest

from pretrain.runs.lock import RunLock
from tests.command_line import assert_refused, files_under
from tests.ranks import run_ranks, train_on_warm_ranks, train_to_end
from tests.tiny import tiny_overrides

ELSEWHERE = {"host": "n17", "space": "", "pid": 4711}


@pytest.fixture
def overrides(tiny_shards: Path, tmp_path: Path) -> list[str]:
    return tiny_overrides(tiny_shards, tmp_path, "run", checkpoint__every=2, schedule__steps=4)


def test_a_second_starter_is_refused_on_all_ranks_and_changes_nothing(
    overrides: list[str], tmp_path: Path
) -> None:
    lock = RunLock(tmp_path / "run")
    assert lock.take()
    files = files_under(tmp_path)
    assert_refused(
        train_on_warm_ranks(overrides, ranks=2), "is training", "renewed its lock", "leave it to"
    )
    assert files_under(tmp_path) == files
    lock.release()
    train_to_end(overrides, ranks=2)
    assert not (tmp_path / "run/lock").exists()


def test_a_training_that_has_lost_its_lock_stops_on_all_ranks(
    overrides: list[str], tmp_path: Path
) -> None:
    payload = {"overrides": overrides, "holder": json.dumps(ELSEWHERE)}
    said = run_ranks(2, "tests.distributed.workers.waiting:loses_its_lock", payload)
    assert "process 4711 on n17 is training" in said and "stops without saving" in said
    assert json.loads((tmp_path / "run/lock").read_text()) == ELSEWHERE
    assert not list((tmp_path / "run").rglob("COMPLETE"))


@pytest.mark.parametrize(("every", "steps"), [(1, 4), (2, 4), (2, 1)])
def test_a_training_that_lost_its_lock_within_a_step_writes_nothing(
    every: int, steps: int, tiny_shards: Path, tmp_path: Path
) -> None:
    """Neither a record nor a checkpoint nor an end, which would be in another training's files."""
    sizes = {"checkpoint__every": every, "schedule__steps": steps, "schedule__warmup_steps": 1}
    payload = {
        "overrides": tiny_overrides(tiny_shards, tmp_path, "run", **sizes),
        "holder": json.dumps(ELSEWHERE),
    }
    said = run_ranks(2, "tests.distributed.workers.waiting:loses_its_lock_in_a_step", payload)
    assert "process 4711 on n17 is training" in said and "stops without saving" in said
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""
    assert not [*(run / "checkpoints").glob("*")] and not (run / "summary.json").exists()
    assert (run / "state").read_text() == "running\n"
