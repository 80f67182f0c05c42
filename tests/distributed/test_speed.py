"""What makes a step fast changes nothing else.

The peer's losses, AdamW that clips, the benchmark.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, run_program, run_ranks
from tests.tiny import tiny_overrides

STEPS = 20
WORKER = "tests.distributed.workers.speed"


def overrides(directory: Path, **changes: object) -> list[str]:
    return tiny_overrides(
        directory,
        directory,
        "speed",
        **{
            "model__hidden_size": 64,
            "model__position_embedding": "rope",
            "attention__variant": "vanilla",
            "data__global_batch_size": 2,
            "schedule__kind": "constant",
            "schedule__warmup_steps": 0,
            "optimizer__learning_rate": 1e-3,
        }
        | changes,
    )


@pytest.mark.parametrize(
    ("recipe", "more", "close"),
    [
        ("gpt2", "deepspeed.config=zero0", 1e-5),
        ("modern", "", 1e-5),
        # One head, since ours takes queries and keys by heads; and torch's Muon is in bf16 alone.
        (
            "modern_muon",
            "model.num_attention_heads=1 optimizer.muon.newton_schulz_dtype=bf16 "
            "optimizer.learning_rate=3e-3",
            5e-4,
        ),
    ],
)
def test_plain_pytorch_trains_to_the_same_losses(
    tmp_path: Path, recipe: str, more: str, close: float
) -> None:
    """Else the benchmark would compare different work."""
    payload = {"recipe": recipe, "overrides": [*overrides(tmp_path), *more.split()]}
    report = run_ranks(1, f"{WORKER}:losses_beside_plain", payload | {"steps": STEPS})
    assert report["ours"][-1] < 0.9 * report["ours"][0]
    assert report["ours"] == pytest.approx(report["plain"], abs=close)
    assert report["norm"] == pytest.approx(report["plain norm"], rel=10 * close)


@pytest.mark.parametrize("clip", [100.0, 0.0])
def test_adamw_that_clips_is_clipping_and_adamw(tmp_path: Path, clip: float) -> None:
    payload = {"overrides": overrides(tmp_path, optimizer__gradient_clip=clip)}
    report = run_ranks(1, f"{WORKER}:clipping_adamw", payload)
    assert report["worst"] < 1e-6 and report["norm"] < 1e-6
    # A norm that is no number moves nothing, and is no step.
    assert report["moved by nan"] == 0.0 and report["steps"] == 6


def test_every_engine_clips_to_the_same_norm(tiny_shards: Path, tmp_path: Path) -> None:
    engines: dict[str, dict[str, object]] = {
        "zero0": {"deepspeed__config": "zero0"},
        "zero1": {"deepspeed__config": "zero1"},
        "bf16": {"precision__dtype": "bf16"},
        "bf16-unclipped": {"precision__dtype": "bf16", "optimizer__gradient_clip": 0},
    }
    runs = {
        name: tiny_overrides(
            tiny_shards, tmp_path, name, **{"optimizer__gradient_clip": 0.05, **engine}
        )
        for name, engine in engines.items()
    }
    norms = run_ranks(1, f"{WORKER}:clipped_moments", {"runs": runs})
    for name, (norm, taken) in norms.items():
        assert norm == pytest.approx(norms["zero1"][0], rel=0.02) and norm > 0.1, name
        assert taken == pytest.approx(norm if name == "bf16-unclipped" else 0.05, rel=1e-4), name


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 0)])
def test_cuda_is_told_to_order_its_work_only_for_tensor_parallelism(
    tmp_path: Path, ranks: int, stage: int
) -> None:
    changes = {"parallel__tensor_model_parallel_size": ranks, "deepspeed__config": f"zero{stage}"}
    facts = run_ranks(ranks, f"{WORKER}:environment", {"overrides": overrides(tmp_path, **changes)})
    assert facts == {"connections": "1" if ranks > 1 else None, "throughput timer": False}


@pytest.mark.slow
def test_the_benchmark_measures_every_contender(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.step.measure", "--steps=2", "--shape=1x64x1x16"]
    options = ["--settings", "", "deepspeed.config=zero1", "--json", report_file]
    done = run_program([*command, *options], environment={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(report_file.read_text())
    kinds = ("vanilla", "orthogonal", "vanilla again", "orthogonal again")
    engines = {*kinds, *(f"{kind} (config=zero1)" for kind in kinds)}
    assert report["zero_stage"] == {name: int("zero1" in name) for name in engines} | {
        "plain": None
    }
    assert report["ratio"]["plain"].keys() == engines
    assert report["seconds"].keys() == engines | {"plain"}
    assert report["parts"].keys() == {name for name in report["seconds"] if "again" not in name}
    for name in report["parts"]:
        parts = report["parts"][name]
        assert parts.keys() == {"data", "forward", "backward", "reduction", "optimizer"}
        assert min(parts.values()) >= 0 and parts["forward"] > 0
        assert {"product", "attention", "optimizer", "norm"} <= report["kernels"][name].keys()
