"""`make gpu-check` on the CPU: the stages of a GPU, in small sizes; none takes another with it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu.context import StageContext, StageReport, StageResult
from tests.ranks import run_program

STAGES = ("large", "parity", "resume")


@pytest.mark.full
def test_the_check_runs_on_a_cpu(tiny_shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    done = run_program([*command, "--shards", str(tiny_shards), "--stages", *STAGES])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    stages = report["stages"]
    assert {name: stage["state"] for name, stage in stages.items()} == dict.fromkeys(STAGES, "ok")
    assert report["gpu"] == "none"

    curves = stages["parity"]["found"]["orthogonal"]
    # Without a GPU it is the CPU twice.
    assert curves["cpu"] == curves["gpu"] and len(curves["cpu"]) == 5
    steps = stages["large"]["found"]
    assert min(steps["seconds"].values()) > 0
    assert steps["ratio"]["plain"].keys() == {"orthogonal", "vanilla", "orthogonal again"}
    assert {"product", "optimizer"} <= steps["kernels"]["orthogonal"].keys()
    assert steps["failed"] == {} and steps["left_out"] == []


@pytest.mark.distributed
def test_a_stage_that_fails_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(context: StageContext) -> StageResult:
        code = "import time; print('begun', flush=True); time.sleep(300)"
        context.run("hangs", [sys.executable, "-c", code])
        return StageResult({})

    def wrong(context: StageContext) -> StageResult:
        return StageResult({"number": 2}, {"two is three": False, "two is two": True})

    works = {"hangs": hangs, "wrong": wrong, "good": lambda _: StageResult({})}
    stages_in_turn = tuple(
        gpu_check.Stage(name, work, 3 / gpu_check.PATIENCE_ON_CPU) for name, work in works.items()
    )
    monkeypatch.setattr(gpu_check, "STAGES", stages_in_turn)
    report = StageReport(tmp_path / "report.json")
    until = time.monotonic() + 100
    context = StageContext(
        tmp_path / "work",
        tmp_path,
        until=until,
        small=True,
        at_once=1,
        environment=gpu_check.environment(),
    )
    gpu_check.run_stages(context, report, works)
    stages = json.loads((tmp_path / "report.json").read_text())["stages"]
    states = {"hangs": "failed", "wrong": "failed", "good": "ok"}
    assert {name: stage["state"] for name, stage in stages.items()} == states
    assert "begun" in stages["hangs"]["error"] and stages["hangs"]["seconds"] < 30
