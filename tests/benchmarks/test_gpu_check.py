"""`make gpu-check` on the CPU: the stages of a GPU, in small sizes; none takes another with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu.card import attention_curve, card_of
from benchmarks.gpu.context import StageContext, StageReport, StageResult
from pretrain.plan.cards import find_gpu
from tests.ranks import ROOT, rank_environment

STAGES = ("card", "parity", "structured", "large_2048", "switches_2", "modern_scores")


@pytest.mark.full
def test_the_check_runs_on_a_cpu(tiny_shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--out",
        str(out),
        "--shards",
        str(tiny_shards),
    ]
    done = subprocess.run(
        [*command, "--stages", *STAGES],
        cwd=ROOT,
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "gpu-check.json").read_text())
    stages = report["stages"]
    assert {name: stage["state"] for name, stage in stages.items()} == dict.fromkeys(STAGES, "ok")
    assert report["gpu"] == "none"

    curves = stages["parity"]["found"]["orthogonal"]
    # Without a GPU it is the CPU twice.
    assert curves["cpu"] == curves["gpu"] and len(curves["cpu"]) == 5
    steps = stages["large_2048"]["found"]
    assert min(steps["seconds"].values()) > 0
    assert steps["ratio"]["plain"].keys() == {"orthogonal", "vanilla", "orthogonal again"}
    assert {"product", "optimizer"} <= steps["kernels"]["orthogonal"].keys()
    assert steps["failed"] == {} and steps["left_out"] == []
    switches = stages["switches_2"]["found"]
    assert switches["zero_stage"]["vanilla (config=zero2)"] == 2
    assert switches["ratio"]["vanilla"]["vanilla (recompute=attention)"]["median"] > 0

    structured = stages["structured"]
    assert len(structured["checks"]) == 20 and not structured["found"]["failed"]
    assert structured["found"]["sizes"].keys() == {"128, bfloat16", "192, float32"}

    # The card of a GPU is made of the same values.
    rates = stages["card"]["found"]["rates"]
    card, notes = card_of(
        rates, {"name": "NVIDIA H200", "memory_bytes": 150e9, "power.limit": "700.00"}
    )
    file = tmp_path / "card.json"
    file.write_text(card.model_dump_json())
    assert find_gpu(str(file)) == card and card.peak_tflops == 989.4 and len(notes) == 1


def test_attention_is_fitted_through_what_was_measured() -> None:
    most, half = attention_curve(
        {length: 300 * length / (length + 500) for length in (512, 2048, 8192)}
    )
    assert (most, half) == (pytest.approx(300), pytest.approx(500))


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
    waves = tuple(
        (gpu_check.Stage(name, work, 3 / gpu_check.PATIENCE_ON_CPU),)
        for name, work in works.items()
    )
    monkeypatch.setattr(gpu_check, "WAVES", waves)
    report = StageReport(tmp_path / "report.json")
    until = time.monotonic() + 100
    context = StageContext(
        tmp_path / "work",
        tmp_path,
        until=until,
        on_gpu=False,
        at_once=1,
        environment=gpu_check.environment(),
    )
    gpu_check.run_waves(context, report, works)
    stages = json.loads((tmp_path / "report.json").read_text())["stages"]
    states = {"hangs": "failed", "wrong": "failed", "good": "ok"}
    assert {name: stage["state"] for name, stage in stages.items()} == states
    assert "begun" in stages["hangs"]["error"] and stages["hangs"]["seconds"] < 30
