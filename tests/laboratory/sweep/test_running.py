"""Sweeps whose runs are busy, finished, damaged or only listed; none of them trains anything."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from laboratory.sweep.grid import read_grid
from laboratory.sweep.plan import PlannedRun, plan_sweep
from laboratory.sweep.running import Outcome, SignalRelay, devices_of_slot, run_sweep
from laboratory.sweep.verb import Progress
from pretrain.__main__ import app
from pretrain.config.load import load_config
from pretrain.config.sources import dump_yaml
from pretrain.errors import UserError


def plan(directory: Path, base: str = "demo", **content: Any) -> list[PlannedRun]:
    """The runs of a grid file with these keys, whose runs are in `directory`/runs."""
    fixed = {"parallel.tensor_model_parallel_size": 1, "schedule.kind": "wsd"}
    path = directory / "grid.yaml"
    whole = {"base": base, "directory": str(directory / "runs"), "set": fixed, **content}
    path.write_text(dump_yaml(whole))
    return plan_sweep(read_grid(str(path)), None, (), lambda _: 1, check_data=False)


def finish(run: PlannedRun) -> None:
    """Leave what says that a run is finished, without a result that can be read."""
    run.path.mkdir(parents=True)
    (run.path / "config.yaml").write_text(run.config.to_yaml())
    (run.path / "summary.json").write_text("{}")
    (run.path / "state").write_text("finished\n")


def swept(runs: Sequence[PlannedRun], jobs: int = 1) -> dict[str, Outcome]:
    """The outcomes of a sweep of which nothing may start."""

    def report(run: PlannedRun, outcome: Outcome | None) -> None:
        assert outcome is not None, f"{run.name} was started"

    outcomes = run_sweep(runs, jobs, 1, signals=SignalRelay(), report=report)
    return {outcome.run.name: outcome for outcome in outcomes}


def test_a_branch_waits_for_the_trunk_that_another_sweep_is_running(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [{"name": "branch", "schedule.branch_from": "trunk"}]
    branch, trunk = plan(tmp_path, list=[*entries, {"name": "trunk", "schedule.steps": 400}])
    trunk.log.parent.mkdir(parents=True)
    seen: list[tuple[str, str]] = []
    with trunk.log.open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)

        def report(run: PlannedRun, outcome: Outcome | None) -> None:
            assert outcome is not None, f"{run.name} was started"
            seen.append((run.name, outcome.ending))
            if outcome.ending == "busy":
                finish(branch)
                finish(trunk)

        run_sweep([branch, trunk], 1, 1, signals=SignalRelay(), report=report)
    elsewhere = "finished elsewhere"
    assert seen == [("trunk", "busy"), ("trunk", elsewhere), ("branch", elsewhere)]


def test_a_log_that_cannot_be_written_fails_its_run_alone(tmp_path: Path) -> None:
    full, blocked, finished = runs = plan(tmp_path, seeds=[1, 2, 3])
    blocked.log.mkdir(parents=True)
    full.log.symlink_to("/dev/full")
    finish(finished)
    outcomes = swept(runs)
    assert [outcome.ending for outcome in outcomes.values()] == [
        "failed",
        "failed",
        "finished elsewhere",
    ]
    assert "No space left" in outcomes["seed_1"].detail
    assert "Is a directory" in outcomes["seed_2"].detail


def test_a_run_whose_base_was_edited_since_the_plan_fails(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(load_config("demo").to_yaml())
    first, second = runs = plan(tmp_path, base=str(base), seeds=[1, 2])
    finish(first)
    base.write_text(load_config("demo", ["optimizer.learning_rate=0.1"]).to_yaml())
    outcomes = swept(runs)
    assert outcomes[first.name].ending == "finished elsewhere"
    assert outcomes[second.name].ending == "failed"
    assert f"{base} was edited since this sweep began" in outcomes[second.name].detail


def test_runs_on_the_cpu_need_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laboratory.sweep.running.visible_devices", lambda: ["0"])
    (run,) = plan(tmp_path, seeds=[2**64 - 1])
    with pytest.raises(UserError, match="needs 2 GPUs and there are 1"):
        swept([run], jobs=2)
    (run,) = plan(tmp_path, seeds=[2**64 - 1], grid={"run.device": ["cpu"]})
    finish(run)
    assert swept([run], jobs=2)[run.name].done


def test_a_finished_run_whose_result_is_damaged_has_no_loss_in_the_table(tmp_path: Path) -> None:
    (run,) = plan(tmp_path, seeds=[1])
    finish(run)
    assert Outcome(run, "finished before").validation() == (None, None)


def test_the_time_left_is_that_of_finished_runs_over_the_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = plan(tmp_path, seeds=[*range(1, 17)])
    report = Progress(runs, jobs=8)
    for run in runs[:8]:
        report(run, None)
    report(runs[0], Outcome(runs[0], "failed"))
    report(runs[1], Outcome(runs[1], "busy"))
    assert "(1 of 16)" in capsys.readouterr().out
    report(runs[2], Outcome(runs[2], "finished", seconds=400.0))
    left = "about 0:10:50 left"  # 5 and 8 runs of 400 seconds, 8 at a time
    assert f"(2 of 16, {left})" in capsys.readouterr().out


def test_each_run_at_a_time_has_gpus_of_its_own() -> None:
    assert ["".join(devices_of_slot("abcdef", n, 3, 2)) for n in range(3)] == ["ab", "cd", "ef"]


def test_a_dry_run_is_a_table_with_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    variants = ("vanilla", "orthogonal")
    runs = plan(tmp_path, grid={"attention.variant": [*variants]})
    done = CliRunner().invoke(app, ["sweep", str(tmp_path / "grid.yaml"), "--dry-run"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("every run: demo ") and "schedule.kind=wsd" in lines[0]
    for name, run in zip(variants, runs, strict=True):
        (row,) = [line.split() for line in lines if line.startswith(f"{name} ")]
        flops = f"{run.config.total_flops:.2e}"
        assert row == [name, "new", f"attention.variant={name}", "0.5", "M", flops]
    total = sum(run.config.total_flops for run in runs)
    assert lines[-1].startswith(f"2 of 2 runs to train: {total:.2e} FLOPs, about 0:0")
    task = ["--dry-run", "--task", "2", "--num-tasks", "3"]
    done = CliRunner().invoke(app, ["sweep", str(tmp_path / "grid.yaml"), *task])
    assert done.exit_code == 0 and "none is this one's" in done.output
    trunk = {"name": "trunk", "schedule.steps": 400}
    branch = {"name": "branch", "schedule.steps": 100, "schedule.branch_from": "trunk"}
    (whole, decay) = plan(tmp_path, list=[trunk, branch])  # of 100 steps the last 20 decay
    done = CliRunner().invoke(app, ["sweep", str(tmp_path / "grid.yaml"), "--dry-run"])
    total = whole.config.total_flops + decay.config.total_flops * 20 / 100
    assert f"2 of 2 runs to train: {total:.2e} FLOPs" in done.output.splitlines()[-1]
