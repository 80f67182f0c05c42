"""From text to a comparison by job scripts alone, on a real Slurm: an array, a sweep, the whole chain."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from data_pipeline.manifest import read_manifest
from tests.command_line import cli
from tests.data_pipeline.helpers import contents
from tests.slurm.cluster import wait_until
from tests.slurm.drills import STEPS, Drills, assert_same_run, training_overrides

pytestmark = pytest.mark.timeout(1500)
GOOD_NODES = "--exclude=n6"
SMALL_JOB = ("--cpus-per-task=1", GOOD_NODES)


def test_tokenize_array_with_a_task_that_is_killed(drills: Drills, tmp_path: Path) -> None:
    cluster, shards = drills.cluster, tmp_path / "shards"
    settings = {
        "ORA_CORPUS": drills.shards.parent / "corpus",
        "ORA_TOKENIZER": drills.shards.parent / "tokenizer.model",
        "ORA_SHARDS": shards,
        "ORA_NAME": "tiny",
        "ORA_NUM_TASKS": 3,
    }
    environment = drills.environment(settings)
    log = f"--output={tmp_path}/%x-%A_%a.log"
    array = cluster.sbatch(
        *("--array=0-2%2", *SMALL_JOB, log, "slurm/tokenize.sh"), environment=environment | {"HOLD_TASK": "1"}
    )
    after = (f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes")
    merge = cluster.sbatch(*SMALL_JOB, *after, log, "slurm/merge.sh", environment=environment)

    def held() -> list[psutil.Process]:
        return cluster.processes("data_pipeline", "tokenize", SLURM_ARRAY_TASK_ID="1")

    wait_until(lambda: bool(held()) and (shards / "plan.json").is_file(), "task 1 to work", timeout=120)
    for process in held():
        process.kill()
    logs = {}
    cluster.wait_for_end(merge, describe=lambda: "\n".join(p.read_text() for p in tmp_path.glob("*.log")))
    for path in tmp_path.glob("*.log"):
        logs[path.name] = path.read_text()
    assert cluster.job(merge).state == "COMPLETED", logs
    assert sorted(job.restarts for job in cluster.jobs(array)) == [0, 0, 1], logs
    assert "all as the manifest says" in logs[f"ora-merge-{merge}_4294967294.log"], logs
    assert contents(shards) == contents(drills.shards)


def test_sweep_of_two_variants_and_two_seeds(drills: Drills, tmp_path: Path) -> None:
    cluster, runs = drills.cluster, tmp_path / "runs"
    fixed = dict(word.split("=", 1) for word in training_overrides(drills.shards, runs, "any"))
    for key in ("run.name", "run.directory", "attention.variant"):
        del fixed[key]
    grid = {
        "base": "demo",
        "directory": str(runs),
        "set": {key: yaml.safe_load(value) for key, value in fixed.items()},
        "grid": {"attention.variant": ["vanilla", "orthogonal"]},
        "seeds": [1, 2],
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    settings = {
        "ORA_GRID": tmp_path / "grid.yaml",
        "ORA_NUM_TASKS": 3,  # so task 0 trains two of the four runs
        "ORA_DOCTOR": 0,
        "ORA_RUNS": runs,
        "ORA_OUT": tmp_path / "comparison",
    }
    environment = drills.environment(settings)
    log = f"--output={tmp_path}/%x-%A_%a.log"
    shape = ("--array=0-2%2", "--nodes=2", "--ntasks-per-node=1")
    array = cluster.sbatch(*shape, *SMALL_JOB, log, "slurm/sweep.sh", environment=environment)
    after = (f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes")
    compare = cluster.sbatch(*SMALL_JOB, *after, log, "slurm/compare.sh", environment=environment)

    cluster.wait_for_end(compare, describe=lambda: "\n".join(p.read_text() for p in tmp_path.glob("*.log")))
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert [job.state for job in cluster.jobs(array)] == ["COMPLETED"] * 3, logs
    assert cluster.job(compare).state == "COMPLETED", logs
    names = sorted(path.parent.name for path in runs.glob("*/config.yaml"))
    assert len(names) == 4
    found = [json.loads((runs / name / "summary.json").read_text())["step"] for name in names]
    assert found == [STEPS] * 4
    report = (tmp_path / "comparison/report.md").read_text()
    assert "vanilla" in report and "orthogonal" in report
    name = next(name for name in names if "orthogonal" in name)
    config = runs / name / "config.yaml"
    done = cli(["train", str(config), f"run.directory={tmp_path / 'alone'}", "--local-ranks", "2"])
    assert done.returncode == 0, done.stderr
    assert_same_run(runs / name, tmp_path / "alone" / name)


def test_the_chain_of_submit_on_the_demo_corpus(drills: Drills, tmp_path: Path) -> None:
    """Download, tokenizer, array, merge, two runs, comparison: one command, then only waiting."""
    cluster, runs = drills.cluster, tmp_path / "runs"
    overrides = training_overrides(tmp_path / "shards", runs, "any")
    own = ("run.name", "run.directory", "attention.variant", "data.directory", "model.vocab_size")
    overrides = [word for word in overrides if word.split("=")[0] not in own]
    done = cluster.run(
        *(sys.executable, "slurm/submit.py", "demo", *overrides, "model.vocab_size=4096"),
        *("--corpus", tmp_path / "corpus", "--tokenizer", tmp_path / "tokenizer.model"),
        *("--shards", tmp_path / "shards", "--runs", runs, "--tasks", 2),
        *("--sbatch", f"all=--cpus-per-task=1 --output={tmp_path}/%x.log {GOOD_NODES}"),
        *("--sbatch", "pretrain=--nodes=2 --ntasks-per-node=2"),
        environment=drills.environment({"ORA_DOCTOR": 0}),
    )
    assert done.returncode == 0, done.stderr
    jobs = {name: int(number) for number, name in re.findall(r"^ *(\d+)  (\S+)", done.stdout, re.MULTILINE)}
    assert list(jobs)[-1] == "compare" and len(jobs) == 7, done.stdout
    cluster.wait_for_end(
        jobs["compare"],
        600,
        describe=lambda: "\n".join(p.read_text() for p in sorted(tmp_path.glob("*.log"))),
    )
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    for name, number in jobs.items():
        assert {job.state for job in cluster.jobs(number)} == {"COMPLETED"}, (name, logs)
    assert read_manifest(tmp_path / "shards").tokenizer.vocab_size == 4096
    assert "orthogonal" in (runs / "comparison-demo/report.md").read_text()
    alone = tmp_path / "alone"
    config = runs / "demo-orthogonal/config.yaml"
    again = cli(["train", str(config), f"run.directory={alone}", "--local-ranks", "4"])
    assert again.returncode == 0, again.stderr
    assert_same_run(runs / "demo-orthogonal", alone / "demo-orthogonal")
