"""optimizer.qk_clip in runs: what it does to scores, under every layout, and through a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import LARGEST_SCORE
from tests.command_line import assert_same_checkpoint
from tests.distributed.designs import design_overrides
from tests.ranks import train_to_end

pytestmark = pytest.mark.slow

STEPS, LIMIT = 4, 1.2
TP = {"parallel__tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "tensor-parallel": (2, 1, {**TP, "parallel__sequence_parallel": True}),
    "zero2": (2, 2, {}),
}


def trained(
    shards: Path, run: Path, ranks: int = 1, stage: int = 0, **keys: object
) -> list[dict[str, float]]:
    """Train at a rate that leaves the scores of the start, some 5, as they are."""
    changes: dict[str, object] = {
        "schedule__steps": STEPS,
        "optimizer__learning_rate": 1e-6,
        "optimizer__qk_clip": LIMIT,
        "telemetry__attention_every": 1,
        "checkpoint__every": 2,
        "checkpoint__fall_back": True,
        "data__micro_batch_size": 1,
        **keys,
    }
    overrides = design_overrides(
        "orthogonal_trainable", shards, run.parent, name=run.name, zero_stage=stage, **changes
    )
    train_to_end(overrides, ranks)
    return list(read_metrics(run / "metrics.jsonl"))


def largest(record: dict[str, float]) -> float:
    return max(LARGEST_SCORE.members(record).values())


@pytest.mark.parametrize(("layout", "groups"), [("tensor-parallel", 2), ("zero2", 4)])
def test_scores_come_down_to_the_limit_under_every_layout(
    layout: str, groups: int, tiny_shards: Path, tmp_path: Path
) -> None:
    keys: dict[str, object] = {"model__num_query_groups": groups}
    free = trained(tiny_shards, tmp_path / "free", **keys, optimizer__qk_clip="null")
    alone = trained(tiny_shards, tmp_path / "alone", **keys)
    assert largest(free[-1]) > 2.5 * LIMIT
    # Every head has exactly the limit on the first batch; on other text the largest is near it.
    assert 0.6 * LIMIT < largest(alone[-1]) < 1.4 * LIMIT
    ranks, stage, changes = LAYOUTS[layout]
    run = trained(tiny_shards, tmp_path / layout, ranks, stage, **keys, **changes)
    for record, other in zip(alone, run, strict=True):
        for tag in ("loss/train", LARGEST_SCORE.of("00"), LARGEST_SCORE.of("01")):
            assert other[tag] == pytest.approx(record[tag], rel=1e-4), tag


def test_scores_below_the_limit_change_no_bit(tiny_shards: Path, tmp_path: Path) -> None:
    for name, limit in {"free": "null", "far": 1e6}.items():
        trained(tiny_shards, tmp_path / name, stage=1, optimizer__qk_clip=limit)
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_checkpoint(tmp_path / "free" / last, tmp_path / "far" / last)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(
    dtype: str, tiny_shards: Path, tmp_path: Path
) -> None:
    keys = {**TP, "precision__dtype": dtype, "optimizer__learning_rate": 1e-3}
    whole = trained(tiny_shards, tmp_path / "whole", 2, 1, **keys)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    last = f"checkpoints/step_{STEPS:08d}"
    shutil.rmtree(tmp_path / "again" / last)
    again = trained(tiny_shards, tmp_path / "again", 2, 1, **keys)
    assert again[-1]["loss/train"] == whole[-1]["loss/train"]
    assert_same_checkpoint(tmp_path / "whole" / last, tmp_path / "again" / last)
