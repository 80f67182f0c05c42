"""The run directory: which checkpoint is the newest.

Also that its names are written in one place only.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.report import write_comparison
from laboratory.compare.tables import cost_table
from pretrain.errors import UserError
from pretrain.runs.directory import (
    CONTINUE,
    FINISHED,
    MARKER,
    RUNNING,
    STOPPED,
    RunDirectory,
    newest_checkpoint_bytes,
    step_of,
)
from tests.fabricated_checkpoints import bare_checkpoint
from tests.fabricated_runs import write_run
from tests.parsed_files import texts
from tests.ranks import ROOT


def test_the_newest_checkpoint_is_that_of_the_highest_step_with_a_marker(tmp_path: Path) -> None:
    """Also where the number outgrows its eight digits, and beside what is no checkpoint."""
    run = RunDirectory(tmp_path)
    assert (run.newest_checkpoint(), run.trained_steps()) == (None, 0)
    old = bare_checkpoint(run, 7)
    bare_checkpoint(run, 200, marked=False)
    assert (run.newest_checkpoint(), run.trained_steps()) == (old, 7)
    many = [bare_checkpoint(run, step) for step in (99_999_999, 100_000_000)]
    (run.checkpoints / "step_of_mine").mkdir()
    (run.checkpoints / "step_of_mine" / MARKER).write_text("{}")
    assert run.complete_checkpoints() == [*reversed(many), old]
    assert [step_of(path) for path in run.complete_checkpoints()] == [100_000_000, 99_999_999, 7]
    with pytest.raises(ValueError, match="step_of_mine is not named like a checkpoint"):
        step_of(run.checkpoints / "step_of_mine")


def test_a_run_is_finished_when_it_says_so_and_its_result_is_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.state() is None and not run.is_finished()
    run.write_state(FINISHED)
    assert not run.is_finished()
    run.summary.write_text("{}")
    assert run.is_finished()
    for state in (RUNNING, CONTINUE, STOPPED):
        run.write_state(state)
        assert run.state() == state and not run.is_finished()


@pytest.mark.parametrize("latest", [None, "step_00000050\n", "step_00000002\n"])
def test_a_kill_between_marker_and_latest_leaves_a_run_that_can_be_compared(
    tmp_path: Path, latest: str | None
) -> None:
    """The markers decide.

    `latest` is then missing, or names a checkpoint that is incomplete or removed.
    """
    path = write_run(tmp_path, "vanilla", checkpoint_bytes=12_345)
    RunDirectory(path).latest.unlink()
    if latest is not None:
        RunDirectory(path).latest.write_text(latest)
    assert newest_checkpoint_bytes(path) == 12_345
    assert compare_runs([path], "vanilla").variants[0].cost.states.checkpoint_bytes == 12_345


def test_a_run_whose_checkpoints_were_removed_can_be_compared(tmp_path: Path) -> None:
    """Weights are large, and nothing that is compared is in them but their size."""
    paths = [write_run(tmp_path, f"o-{seed}", "orthogonal", seed=seed) for seed in (1, 2)]
    shutil.rmtree(RunDirectory(paths[0]).checkpoints)
    comparison = compare_runs(paths, "orthogonal")
    assert comparison.variants[0].cost.states.checkpoint_bytes == 10_000
    shutil.rmtree(RunDirectory(paths[1]).checkpoints)
    comparison = compare_runs(paths, "orthogonal")
    assert comparison.variants[0].cost.states.checkpoint_bytes is None
    rows = [row[0] for row in cost_table(comparison, "").rows]
    assert "checkpoint" not in rows and "checkpoint, by formula" in rows
    write_comparison(comparison, tmp_path / "out", [("compare",)])
    (variant,) = json.loads((tmp_path / "out/comparison.json").read_text())["variants"]
    assert variant["cost"]["checkpoint_bytes"] is None


NAMES = {
    "config.yaml",
    "environment.json",
    "data.json",
    "audit.json",
    "metrics.jsonl",
    "summary.json",
}
NAMES |= {"checkpoints", "latest", MARKER, "step_", FINISHED}
ALLOWED = {
    "sweep/plan.py": {FINISHED},  # words of its own: what a directory holds before a sweep, …
    "sweep/running.py": {FINISHED},  # … and how the sweep's own attempt ended
    "sweep/trial.py": {FINISHED},
    "sweep/verb.py": {FINISHED},
    # Beside the weights that it makes, in no run directory.
    "export/source_model.py": {"config.yaml"},
}


def test_names_of_the_run_directory_are_written_once() -> None:
    files = [*(ROOT / "pretrain").rglob("*.py"), *(ROOT / "laboratory").rglob("*.py")]
    owner = ROOT / "pretrain/runs/directory.py"
    for path in files:
        if path != owner:
            repeated = texts(path) & NAMES
            name = "/".join(path.relative_to(ROOT).parts[1:])
            assert repeated <= ALLOWED.get(name, set()), f"{name} writes {repeated} again"
    assert {"config.yaml", "latest", MARKER, FINISHED, "step_"} <= texts(owner)


@pytest.mark.parametrize("closed", ["checkpoints", "checkpoints/step_00000002"])
def test_checkpoints_that_cannot_be_read_are_not_missing(closed: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    checkpoint = bare_checkpoint(run, 2)
    assert run.find_checkpoint(None) == checkpoint
    (tmp_path / closed).chmod(0)
    for directory in (tmp_path, *list(tmp_path.parents)[:-2]):
        directory.chmod(directory.stat().st_mode | 0o055)
    user = os.geteuid()
    if user == 0:  # whom no permissions stop
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match=rf"{closed} cannot be read \(Permission denied\)"):
            run.find_checkpoint(None)
    finally:
        os.seteuid(user)
        (tmp_path / closed).chmod(0o755)
