"""Sweeps of real runs: failures, skipping, slices, signals, resuming; and what runs of one seed
share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from laboratory.slurm import app as job
from laboratory.sweep.grid import expand, read_grid
from laboratory.sweep.plan import plan_sweep
from tests.command_line import cli, files_under, held_before, logged_steps, wait_until
from tests.fabricated_runs import write_planned_run
from tests.fabricated_seals import finish, planned, runs_of, sealed
from tests.ranks import ROOT, rank_environment, run_ranks, warm_cli
from tests.tiny import tiny_grid

pytestmark = pytest.mark.timeout(1200)

KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"attention.variant": "vanilla"},
    "orthogonal": {"attention.variant": "orthogonal"},
    "orthogonal_trainable": {"attention.variant": "orthogonal_trainable"},
    "gaussian": {"attention.variant": "gaussian"},
    "low_rank": {
        "attention.variant": "orthogonal",
        "attention.adapters": ["low_rank", "channel_scale"],
    },
    "hybrid": {"attention.variant": "hybrid"},
    "synthesizer_random": {"attention.variant": "synthesizer_random"},
}


@contextmanager
def sweeping(arguments: list[str], log: Path, hold_at: int) -> Iterator[psutil.Popen]:
    """A sweep in the background, in a session of its own; what is left of it is killed at the end.

    Its runs wait before step `hold_at` until a signal asks them to stop.
    """
    command = [sys.executable, "-m", "pretrain", "sweep", *arguments]
    with log.open("w") as output:
        sweep = psutil.Popen(
            command,
            cwd=ROOT,
            env=rank_environment() | held_before(hold_at),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        family = [sweep]
        try:
            yield sweep
        finally:
            if sweep.is_running():
                family += sweep.children(recursive=True)
                sweep.kill()
            psutil.wait_procs(family, timeout=30)


@pytest.mark.slow
def test_a_failed_run_stops_no_other_and_finished_runs_are_left_alone(
    tiny_shards: Path, tmp_path: Path
) -> None:
    grid = tiny_grid(
        tiny_shards,
        tmp_path,
        {},
        list=[
            {"name": "a"},
            {"name": "diverges", "optimizer.learning_rate": 1e30},
            {"name": "b", "run.seed": 2},
        ],
    )
    runs = tmp_path / "runs"
    write_planned_run(
        plan_sweep(read_grid(grid), None, (), lambda _: 1, check_data=True)[0], tiny_shards, 5.0
    )
    done = cli(["sweep", grid])
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert (runs / "a/state").read_text() == (runs / "b/state").read_text() == "finished\n"
    failure = next(
        line for line in done.stdout.splitlines() if line.startswith("failed: diverges: ")
    )
    assert (
        "error: the training loss is nan at step" in failure
        and f"log: {runs}/logs/diverges.log" in failure
    )
    assert "error: the training loss is nan" in (runs / "logs/diverges.log").read_text()
    assert "1 of 3 runs are left (1 failed); the same command continues with them" in done.stdout
    assert "2 of 3" in done.stdout and "perplexity" in done.stdout

    files = files_under(runs)
    again = warm_cli(["sweep", grid, "--task", "0", "--num-tasks", "2"])
    assert again.returncode == 0, (again.stdout, again.stderr)
    assert "2 runs in" in again.stdout and "all 2 runs are finished" in again.stdout
    assert files_under(runs) == files
    other = warm_cli(["sweep", grid, "schedule.steps=7"])
    assert other.returncode == 2 and "schedule.steps is 6 there and 7 in the grid" in other.stderr
    assert files_under(runs) == files


@pytest.mark.slow
def test_one_command_goes_from_a_grid_of_two_arms_to_the_page(
    tiny_shards: Path, tmp_path: Path
) -> None:
    arms = [
        {"name": "plain", "attention.variant": "vanilla"},
        {"name": "mine", "attention.variant": "orthogonal"},
    ]
    grid = tiny_grid(tiny_shards, tmp_path, {"schedule.steps": 4}, list=arms)
    refused = warm_cli(["sweep", grid, "--compare", "--only", "mine"])
    assert refused.returncode == 2 and "--compare is for the whole grid" in refused.stderr
    done = cli(["sweep", grid, "--compare"])
    assert done.returncode == 0, (done.stdout, done.stderr)
    page = tmp_path / "runs/comparison"
    assert done.stdout.splitlines()[-1] == f"report: {page / 'report.html'}"
    variants = json.loads((page / "comparison.json").read_text())["variants"]
    assert len(variants) == 2 and variants[0]["gap"] is None


def test_what_is_sealed_at_equal_flops_is_compared_there(tiny_shards: Path, tmp_path: Path) -> None:
    """The runs are there, fabricated; their tokens differ."""
    planned(tmp_path, tiny_shards)
    grid = tmp_path / "grid.yaml"
    grid.write_text(grid.read_text().replace("schedule.steps: 6", "schedule.flops: 6000000000"))
    runs = runs_of(read_grid(str(grid)))
    assert len({run.config.total_steps for run in runs}) == 2
    assert sealed(read_grid(str(grid)), runs, "orthogonal worse 1% than vanilla", match="flops")
    finish(runs, tiny_shards, gap=0.03)
    done = warm_cli(["sweep", str(grid), "--compare"])
    assert done.returncode == 0, (done.stdout, done.stderr)
    report = (tmp_path / "runs/comparison/report.md").read_text()
    assert "'orthogonal worse 1 % than vanilla': HIT." in report
    refused = warm_cli(["sweep", str(grid), "--match", "flops"])
    assert refused.returncode == 2 and "add --seal or --compare, or leave" in refused.stderr


@pytest.mark.slow
def test_signals_stop_and_save_the_runs_and_the_same_command_goes_on(
    tiny_shards: Path, tmp_path: Path
) -> None:
    grid = tiny_grid(tiny_shards, tmp_path, {"schedule.steps": 9}, seeds=[1, 2, 3])
    runs = [tmp_path / "runs" / f"seed_{seed}" for seed in (1, 2, 3)]
    arguments, log = [grid, "--jobs", "2"], tmp_path / "log"
    with sweeping(arguments, log, hold_at=3) as sweep:
        for run in runs[:2]:
            wait_until(lambda run=run: 2 in logged_steps(run), sweep, "step 2")
        sweep.send_signal(signal.SIGUSR1)
        assert sweep.wait(timeout=300) == 128 + signal.SIGUSR1, log.read_text()
    assert [(run / "state").read_text() for run in runs[:2]] == ["continue\n"] * 2
    assert not runs[2].exists()
    assert "SIGUSR1 received; 3 of 3 runs are left (2 stopped, 1 not started)" in log.read_text()

    assert [max(logged_steps(run)) for run in runs[:2]] == [3, 3]
    run = runs[0]
    with sweeping([grid], log, hold_at=6) as sweep:
        wait_until(lambda: 5 in logged_steps(run), sweep, "new steps")
        other = tmp_path / "other"
        share = [grid, "--task", "0", "--num-tasks", "3"]
        with sweeping(share, other, hold_at=6) as second:
            waits = "busy     seed_1: another sweep is running it"
            wait_until(lambda: waits in other.read_text(), second, "the other's run to be met")
            second.send_signal(signal.SIGTERM)
            assert second.wait(timeout=60) == 128 + signal.SIGTERM, other.read_text()
        assert "1 of 1 runs are left (1 busy)" in other.read_text()
        # As a terminal's Ctrl-C: once for every process of its group.
        os.killpg(sweep.pid, signal.SIGINT)
        assert sweep.wait(timeout=300) == 128 + signal.SIGINT, log.read_text()
    assert (run / "state").read_text() == "stopped\n"
    assert "resumes after step 3:" in (run.parent / "logs/seed_1.log").read_text()
    assert logged_steps(run) == list(range(1, max(logged_steps(run)) + 1))
    assert "resumed  seed_1" in log.read_text()


@pytest.fixture(scope="module")
def beginnings(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{name of the run: digests of its initial tensors and of its first batches}, from live
    engines."""
    directory = tmp_path_factory.mktemp("beginnings")
    entries = [{"name": name, **values} for name, values in KINDS.items()]
    grid = tiny_grid(
        tiny_shards, directory, {"telemetry.tensorboard": False}, list=entries, seeds=[1, 2]
    )
    runs = {run.name: run.overrides() for run in expand(read_grid(grid))}
    return run_ranks(
        1, "tests.distributed.workers.sweep:beginnings", {"base": "demo", "runs": runs}
    )


def test_runs_of_one_seed_see_the_same_samples_in_the_same_order(
    beginnings: dict[str, Any],
) -> None:
    batches = {name: begin["batches"] for name, begin in beginnings.items()}
    for seed in (1, 2):
        assert len({str(batches[f"{kind}-seed_{seed}"]) for kind in KINDS}) == 1
    assert batches["vanilla-seed_1"] != batches["vanilla-seed_2"]
    assert len(set(batches["vanilla-seed_1"])) == 3


def test_runs_of_one_seed_start_from_the_same_values_in_every_tensor_they_share(
    beginnings: dict[str, Any],
) -> None:
    for seed in (1, 2):
        vanilla = beginnings[f"vanilla-seed_{seed}"]["tensors"]
        shared = {name: value for name, value in vanilla.items() if not name.endswith("query_key")}
        assert len(shared) == 2 * 8 + 3  # of two layers; embedding, last norm
        for kind in KINDS:
            tensors = beginnings[f"{kind}-seed_{seed}"]["tensors"]
            assert {name: tensors.get(name) for name in shared} == shared, kind
            extra = tensors.keys() - shared.keys()
            assert extra and all(".self_attention." in name for name in extra), kind
            assert kind == "vanilla" or any(tensors[name] != vanilla.get(name) for name in extra), (
                kind
            )
    first, two = (beginnings[f"vanilla-seed_{seed}"]["tensors"] for seed in (1, 2))
    assert {name for name in first if first[name] != two[name]} == {
        name for name in first if "norm" not in name
    }


def next_runs(capsys: pytest.CaptureFixture[str], grid: str, task: int) -> list[str]:
    """The run that a job array's task of two is to train next for a trial."""
    question = ("--question", "worse", "--margin", "1", "--num-tasks", "2", "--task", str(task))
    job(["sweep-runs", *question, "--", grid], standalone_mode=False)
    words = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    return [
        word.partition("=")[2] for line in words for word in line if word.startswith("run.name=")
    ]


@pytest.mark.slow
def test_a_trial_trains_what_is_left_and_its_verdict_stays(
    tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four pairs are there, as fabricated runs; the fifth is trained. Far apart: one design hardly
    learns."""
    entries = [{"name": "learns"}, {"name": "hardly", "optimizer.learning_rate": 1e-6}]
    fixed = {"schedule.steps": 12, "telemetry.tensorboard": False}
    grid = tiny_grid(tiny_shards, tmp_path, fixed, list=entries, seeds=[1, 2, 3, 4, 5])
    for run in plan_sweep(read_grid(grid), None, (), lambda _: 1, check_data=True)[:8]:
        loss = 5.0 + 0.01 * run.config.run.seed + 0.5 * run.name.startswith("hardly")
        write_planned_run(run, tiny_shards, loss)
    assert next_runs(capsys, grid, 0) == ["learns-seed_5"] and next_runs(capsys, grid, 1) == [
        "hardly-seed_5"
    ]
    out = tmp_path / "trial"
    command = ["trial", grid, "--question", "worse", "--margin", "1", "--out", str(out)]
    done = warm_cli([*command, "--max-pairs", "5", "--jobs", "2"])
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert (
        "finished hardly-seed_5" in done.stdout
        and "Is hardly more than 1 % worse than learns? Yes: after n = 5"
        in (" ".join(done.stdout.split()))
    )
    assert "Not sealed" in done.stdout  # four pairs were there before
    content = json.loads((out / "trial.json").read_text())
    assert content["answer"] == "yes" and content["cost"]["runs"] == 10 and content["seal"] is None
    assert next_runs(capsys, grid, 0) == next_runs(capsys, grid, 1) == []
    files = files_under(tmp_path)
    again = warm_cli([*command, "--max-pairs", "5"])
    assert again.returncode == 0 and "written: " in again.stdout
    assert files_under(tmp_path) == files
    third = {"name": "third", "optimizer.learning_rate": 2e-3}
    refused = warm_cli(["trial", tiny_grid(tiny_shards, tmp_path, fixed, list=[*entries, third])])
    assert refused.returncode == 2 and "has 3 runs a seed; a trial needs two" in refused.stderr
    branch = {"name": "branch", "schedule.branch_from": "trunk"}
    wsd = {**fixed, "schedule.kind": "wsd"}
    branches = tiny_grid(tiny_shards, tmp_path, wsd, list=[{"name": "trunk"}, branch])
    refused = warm_cli(["trial", branches])
    assert refused.returncode == 2 and "the runs of a trial train whole" in refused.stderr
