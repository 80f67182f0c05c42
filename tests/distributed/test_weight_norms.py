"""Norms of weights and updates, and spectral norms, against the weights of checkpoints.

They and what is measured of attention are the same in any layout, and disturb no training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import SPECTRAL_NORM, UPDATE_NORM, WEIGHT_NORM
from tests.command_line import assert_same_checkpoint, deterministic_metrics
from tests.distributed.designs import design_overrides
from tests.distributed.test_attention_scores import FAMILIES
from tests.ranks import run_ranks, train_to_end

pytestmark = pytest.mark.slow

EVERY, STEPS = 2, 4
PATTERNS = (
    "['*.linear_proj.weight', '*.value_weight', '*_query', 'embedding.word_embeddings.weight']"
)
MEASURED = {
    "telemetry__weights_every": EVERY,
    "telemetry__spectral_norms": PATTERNS,
    "telemetry__attention_every": EVERY,
}
TOLERANCE = {
    **dict.fromkeys((WEIGHT_NORM, UPDATE_NORM, SPECTRAL_NORM), 1e-3),
    **dict.fromkeys(FAMILIES, 1e-5),
}
"""{what is measured: largest relative difference between layouts}"""


def trained(shards: Path, run: Path, ranks: int, stage: int, **keys: object) -> Path:
    """Train a run in which one of two ranks has all frozen heads of the second layer."""
    overrides = design_overrides(
        "modern-hybrid",
        shards,
        runs=run.parent,
        name=run.name,
        zero_stage=stage,
        attention__frozen_heads="{0: 1.0, 1: 0.25}",
        schedule__steps=STEPS,
        checkpoint__every=1,
        checkpoint__keep_last=9,
        **keys,
    )
    train_to_end(overrides, ranks)
    return run


def measured(run: Path) -> list[dict[str, dict[str, float]]]:
    """Return what each record has, by family."""
    return [
        {family.tag: family.members(record) for family in TOLERANCE}
        for record in read_metrics(run / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def alone(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tiny_shards, tmp_path_factory.mktemp("alone") / "run", 1, 1, **MEASURED)


def test_norms_are_those_of_the_weights_in_checkpoints(alone: Path) -> None:
    records = measured(alone)
    for record, wanted in zip(records, (False, True, False, True), strict=True):
        assert {bool(members) for members in record.values()} == {wanted}
    payload = {"run": str(alone), "steps": [STEPS - 1, STEPS]}
    expected: dict[str, Any] = run_ranks(1, "tests.distributed.workers.weight_norms:plain", payload)
    last_record = records[-1]
    assert len(last_record["weights/norm/"]) > 10
    assert last_record["weights/norm/"] == pytest.approx(expected["weights"], rel=1e-5)
    assert last_record["weights/update/"] == pytest.approx(expected["updates"], rel=1e-3)
    assert len(last_record["weights/spectral_norm/"]) == 7
    for name, norm in last_record["weights/spectral_norm/"].items():
        # From below, as a power iteration comes.
        assert 0.95 * expected["spectral"][name] < norm < 1.0001 * expected["spectral"][name], name


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (3, {}),
        (2, {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}),
    ],
    ids=["zero3", "tensor-and-sequence-parallel"],
)
def test_layouts_agree(
    alone: Path, tiny_shards: Path, tmp_path: Path, stage: int, keys: dict[str, object]
) -> None:
    """They train to the same numbers but for rounding."""
    run = trained(tiny_shards, tmp_path / "run", 2, stage, **MEASURED, **keys)
    for record, other in zip(measured(alone), measured(run), strict=True):
        for family, tolerance in TOLERANCE.items():
            expected = pytest.approx(record[family.tag], rel=tolerance)
            assert other[family.tag] == expected, family.tag


def test_the_training_does_not_notice(alone: Path, tiny_shards: Path, tmp_path: Path) -> None:
    without = trained(tiny_shards, tmp_path / "run", 1, 1)
    assert not any(any(record.values()) for record in measured(without))
    losses = [
        [record["loss/train"] for record in deterministic_metrics(run)] for run in (alone, without)
    ]
    assert losses[0] == losses[1]
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_checkpoint(alone / last, without / last)
