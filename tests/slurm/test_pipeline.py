"""From text to a comparison by job scripts alone: an array, a sweep, a trial, the whole chain."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from data_pipeline.shards.manifest import read_manifest
from laboratory.sweep.grid import read_grid
from laboratory.sweep.plan import plan_sweep
from tests.command_line import cli
from tests.data_pipeline.helpers import contents
from tests.fabricated_runs import write_planned_run
from tests.slurm.cluster import wait_until
from tests.slurm.drills import STEPS, Drills, assert_same_run, drill, training_overrides

pytestmark = pytest.mark.timeout(1500)


def logs_in(directory: Path) -> str:
    return "\n".join(
        f"--- {path.name}\n{path.read_text()}" for path in sorted(directory.glob("*.log"))
    )


@drill(nodes=1)
def test_tokenize_array_with_a_task_that_is_killed(drills: Drills) -> None:
    cluster = drills.cluster
    directory = drills.new_directory("tokenize")
    shards, small = directory / "shards", ("--cpus-per-task=1", drills.here)
    settings = {
        "ORA_CORPUS": drills.shards.parent / "corpus",
        "ORA_TOKENIZER": drills.shards.parent / "tokenizer.model",
        "ORA_SHARDS": shards,
        "ORA_NAME": "tiny",
        "ORA_NUM_TASKS": 3,
    }
    environment = drills.environment(settings)
    log = f"--output={directory}/%x-%A_%a.log"
    array = cluster.sbatch(
        "--array=0-2%2",
        *small,
        log,
        "slurm/tokenize.sh",
        environment=environment | {"HOLD_TASK": "1"},
    )
    after = (f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes")
    merge = cluster.sbatch(*small, *after, log, "slurm/merge.sh", environment=environment)

    def held() -> list[psutil.Process]:
        return cluster.processes("data_pipeline", "tokenize", SLURM_ARRAY_TASK_ID="1")

    wait_until(
        lambda: bool(held()) and (shards / "plan.json").is_file(),
        "task 1 to work",
        timeout=400,
        describe=lambda: logs_in(directory),
    )
    for process in held():
        process.kill()
    cluster.wait_for_end(merge, describe=lambda: logs_in(directory))
    logs = {path.name: path.read_text() for path in directory.glob("*.log")}
    assert cluster.job(merge).state == "COMPLETED", logs
    assert sorted(job.restarts for job in cluster.jobs(array)) == [0, 0, 1], logs
    assert "all as the manifest says" in logs[f"ora-merge-{merge}_4294967294.log"], logs
    assert contents(shards) == contents(drills.shards)


def write_grid(drills: Drills, directory: Path, grid: dict[str, object], **changes: object) -> None:
    """Write a grid of tiny runs, one rank on each node, all in `directory`/runs."""
    words = training_overrides(drills.shards, directory / "runs", "any", ranks=2, **changes)
    fixed = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}
    for key in ("run.name", "run.directory", "attention.variant"):
        del fixed[key]
    whole = {"base": "demo", "directory": str(directory / "runs"), "set": fixed, **grid}
    (directory / "grid.yaml").write_text(yaml.safe_dump(whole))


def sweep(drills: Drills, directory: Path, nodes: int, **settings: object) -> set[str]:
    """Let an array of two tasks train the grid in `directory`; return the finished runs' names."""
    defaults = {"ORA_GRID": directory / "grid.yaml", "ORA_NUM_TASKS": 2, "ORA_DOCTOR": 0}
    options = f"--array=0-1 --nodes={nodes} --ntasks-per-node=1 --cpus-per-task=1".split()
    array = drills.cluster.sbatch(
        drills.here,
        *options,
        f"--output={directory}/%x-%A_%a.log",
        "slurm/sweep.sh",
        environment=drills.environment(defaults | settings),
    )
    drills.cluster.wait_for_end(array, describe=lambda: logs_in(directory))
    states = [job.state for job in drills.cluster.jobs(array)]
    assert states == ["COMPLETED"] * 2, logs_in(directory)
    return {path.parent.name for path in (directory / "runs").glob("*/summary.json")}


@pytest.mark.slow
@drill(nodes=4)
def test_sweep_of_three_variants(drills: Drills) -> None:
    """Task 0 trains two of the three runs."""
    directory = drills.new_directory("sweep")
    write_grid(
        drills, directory, {"grid": {"attention.variant": ["vanilla", "orthogonal", "gaussian"]}}
    )
    names = sweep(drills, directory, nodes=2)
    assert len(names) == 3
    for name in names:  # the chain below holds what two nodes train to what one does
        run = directory / "runs" / name
        assert json.loads((run / "summary.json").read_text())["step"] == STEPS
        assert (run / "state").read_text() == "finished\n"


@drill(nodes=2)
def test_a_trial_ends_when_its_question_is_answered(drills: Drills) -> None:
    """Four pairs are there, as fabricated runs; two tasks train the fifth, which is the answer.

    The sixth pair is not trained.
    """
    directory = drills.new_directory("trial")
    arms = [{"name": "learns"}, {"name": "hardly", "optimizer.learning_rate": 1e-6}]
    grid = {"list": arms, "seeds": [1, 2, 3, 4, 5, 6]}
    write_grid(drills, directory, grid, schedule__steps=6, attention__variant="orthogonal")
    planned = plan_sweep(
        read_grid(str(directory / "grid.yaml")),
        base=None,
        overrides=(),
        ranks_of=lambda _: 1,
        check_data=True,
    )
    for run in planned[:8]:
        worse = 0.5 * ("hardly" in run.name)
        write_planned_run(run, drills.shards, 5 + 0.01 * run.config.run.seed + worse)
    question = {"ORA_QUESTION": "worse", "ORA_MARGIN": 1, "ORA_RANKS_PER_NODE": 1}
    names = sweep(drills, directory, nodes=1, **question)
    assert names == {run.name for run in planned[:10]}, logs_in(directory)
    assert (directory / "runs/hardly-seed_5/state").read_text() == "finished\n"


@drill(nodes=4)
def test_the_chain_of_submit_on_the_demo_corpus(drills: Drills) -> None:
    """Download, tokenizer, array, merge, two runs, comparison: one command, then only waiting."""
    cluster = drills.cluster
    directory = drills.new_directory("chain")
    runs = directory / "runs"
    overrides = training_overrides(directory / "shards", runs, "any", ranks=2)
    set_by_submit = (
        "run.name",
        "run.directory",
        "attention.variant",
        "data.directory",
        "model.vocab_size",
    )
    overrides = [word for word in overrides if word.split("=")[0] not in set_by_submit]
    options = (
        f"--corpus={directory}/corpus --tokenizer={directory}/tokenizer.model --tasks=2".split()
    )
    options += [f"--shards={directory}/shards", f"--runs={runs}"]
    options += [f"--sbatch=all=--cpus-per-task=1 --output={directory}/%x.log {drills.here}"]
    options += ["--sbatch=pretrain=--nodes=2 --ntasks-per-node=1"]
    command = [sys.executable, "slurm/submit.py", "demo", *overrides, "model.vocab_size=4096"]
    environment = drills.environment({"ORA_DOCTOR": 0, "ORA_CODE": ""})
    done = cluster.run(*command, *options, environment=environment)
    assert done.returncode == 0, done.stderr
    submitted = re.findall(r"^ *(\d+)  (\S+)", done.stdout, re.MULTILINE)
    jobs = {name: int(number) for number, name in submitted}
    steps = ["download", "tokenizer", "tokenize", "merge", "demo-vanilla", "demo-orthogonal"]
    assert list(jobs) == [*steps, "compare"], done.stdout
    everything = " ".join(map(str, jobs.values()))
    assert f"stop:    scancel {everything}" in done.stdout and "squeue --jobs=" in done.stdout
    cluster.wait_for_end(jobs["compare"], 900, lambda: logs_in(directory))
    logs = logs_in(directory)
    for name, number in jobs.items():
        assert {job.state for job in cluster.jobs(number)} == {"COMPLETED"}, (name, logs)
    assert read_manifest(directory / "shards").tokenizer.vocab_size == 4096
    assert "orthogonal" in (runs / "comparison-demo/report.md").read_text()
    alone = directory / "alone"
    config = runs / "demo-orthogonal/config.yaml"
    again = cli(["train", str(config), f"run.directory={alone}", "--local-ranks", "2"])
    assert again.returncode == 0, again.stderr
    assert_same_run(runs / "demo-orthogonal", alone / "demo-orthogonal")
