"""attention.score_bound in runs: held under every layout, and through a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import LARGEST_SCORE, SCORE_BOUND
from tests.command_line import assert_same_checkpoint
from tests.distributed.designs import design_overrides
from tests.ranks import train_on_warm_ranks

STEPS, LIMIT = 6, 3.0
TP = {"parallel__tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "tensor-parallel": (2, 1, {**TP, "parallel__sequence_parallel": True}),
    "zero2": (2, 2, {}),
}
DESIGNS: dict[str, dict[str, object]] = {
    "monarch_shared_conv": {},
    "modern": {},
    "orthogonal": {},
    "modern-hybrid": {"attention__frozen_heads": "{1: 0.5}"},  # layer 0 has no adapters
}


def trained(
    shards: Path, run: Path, design: str, ranks: int = 1, stage: int = 0, **keys: object
) -> list[dict[str, float]]:
    """Train with a rate at which scales grow; return the records."""
    changes: dict[str, object] = {
        "schedule__steps": STEPS,
        "optimizer__learning_rate": 0.03,
        "attention__score_bound": LIMIT,
        "telemetry__attention_every": 1,
        "checkpoint__every": 3,
        "checkpoint__fall_back": True,
        **DESIGNS[design],
        **keys,
    }
    overrides = design_overrides(
        design, shards, run.parent, name=run.name, zero_stage=stage, **changes
    )
    done = train_on_warm_ranks(overrides, ranks)
    assert done.returncode == 0, done.stderr
    return list(read_metrics(run / "metrics.jsonl"))


def largest(record: dict[str, float]) -> float:
    return max(LARGEST_SCORE.members(record).values())


@pytest.mark.parametrize("design", DESIGNS)
def test_it_is_held_under_every_layout(design: str, tiny_shards: Path, tmp_path: Path) -> None:
    alone = trained(tiny_shards, tmp_path / "alone", design)
    free = trained(tiny_shards, tmp_path / "free", design, attention__score_bound="null")
    assert free[-1][SCORE_BOUND.tag] > 1.02 * LIMIT
    for record in alone:
        assert largest(record) <= record[SCORE_BOUND.tag] <= LIMIT * (1 + 2e-6)
    assert alone[-1][SCORE_BOUND.tag] > 0.9 * LIMIT
    assert all(largest(record) <= record[SCORE_BOUND.tag] for record in free)
    for name, (ranks, stage, keys) in LAYOUTS.items():
        run = trained(tiny_shards, tmp_path / name, design, ranks=ranks, stage=stage, **keys)
        for one, other in zip(alone, run, strict=True):
            for tag in ("loss/train", SCORE_BOUND.tag):
                assert other[tag] == pytest.approx(one[tag], rel=1e-3), (name, tag)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(
    dtype: str, tiny_shards: Path, tmp_path: Path
) -> None:
    keys = {**TP, "precision__dtype": dtype, "ranks": 2, "stage": 1}
    whole = trained(tiny_shards, tmp_path / "whole", "monarch_shared_conv", **keys)  # type: ignore[arg-type]
    assert whole[-1][SCORE_BOUND.tag] <= LIMIT * (1.01 if dtype == "bf16" else 1 + 2e-6)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / f"again/checkpoints/step_{STEPS:08d}")
    again = trained(tiny_shards, tmp_path / "again", "monarch_shared_conv", **keys)  # type: ignore[arg-type]
    assert again[-1]["loss/train"] == whole[-1]["loss/train"]
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_checkpoint(tmp_path / "whole" / last, tmp_path / "again" / last)
