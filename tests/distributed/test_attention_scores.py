"""Entropy, scale and largest score of each layer's attention, measured while a model trains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import ATTENTION_ENTROPY, ATTENTION_SCALE, LARGEST_SCORE
from pretrain.training.validation import spread_of_scores
from tests.command_line import assert_same_checkpoint, deterministic_metrics
from tests.distributed.designs import design_overrides
from tests.ranks import train_on_warm_ranks

pytestmark = pytest.mark.slow

EVERY = 2
STEPS = 4
FAMILIES = (ATTENTION_ENTROPY, ATTENTION_SCALE, LARGEST_SCORE)


def trained(shards: Path, runs: Path, design: str, ranks: int, name: str, **keys: object) -> Path:
    """Train a run of four steps on so many ranks; return its directory."""
    overrides = design_overrides(
        design, shards, runs=runs, name=name, schedule__steps=STEPS, **keys
    )
    done = train_on_warm_ranks(overrides, ranks)
    assert done.returncode == 0, done.stderr
    return runs / name


def measured(run: Path) -> list[dict[str, float]]:
    """Return what each record has of attention."""
    return [
        {tag: value for tag, value in record.items() if tag.startswith("attention/")}
        for record in read_metrics(run / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def alone(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("alone")
    return trained(
        tiny_shards,
        runs,
        design="orthogonal",
        ranks=1,
        name="alone",
        telemetry__attention_every=EVERY,
    )


def test_every_layer_is_measured_when_asked(alone: Path) -> None:
    records = measured(alone)
    assert [bool(record) for record in records] == [
        step % EVERY == 0 for step in range(1, STEPS + 1)
    ]
    layers = {name for family in FAMILIES for name in family.members(records[1])}
    assert layers == {"00", "01"} and len(records[1]) == 6
    for record in (records[1], records[3]):
        most = math.lgamma(17) / 16  # the mean of log n over queries that see n = 1 … 16 keys
        assert all(0 < value < most for value in ATTENTION_ENTROPY.members(record).values())
        scales = ATTENTION_SCALE.members(record)
        largest = LARGEST_SCORE.members(record)
        assert all(0 < scales[layer] < largest[layer] for layer in layers)


@pytest.mark.parametrize("deviation", [2.0, 98.0])
def test_the_spread_counts_keys_whose_probability_is_zero_in_fp32(deviation: float) -> None:
    scores = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)) * deviation
    visible = torch.ones(64, 64, dtype=torch.bool).tril()
    spreads = spread_of_scores(scores, visible)
    rows = scores.double()[0, 1]
    for query in (0, 7, 63):
        expected = rows[query, : query + 1].std(correction=0).item()
        assert spreads[0, 1, query].item() == pytest.approx(expected, rel=1e-9)


def test_the_training_does_not_notice(alone: Path, tiny_shards: Path, tmp_path: Path) -> None:
    without = trained(tiny_shards, tmp_path, design="orthogonal", ranks=1, name="without")
    assert not any(measured(without))
    losses = [
        [record["loss/train"] for record in deterministic_metrics(run)] for run in (alone, without)
    ]
    assert losses[0] == losses[1]
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_checkpoint(alone / last, without / last)


def test_tensor_and_sequence_parallel_ranks_agree(
    alone: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    run = trained(
        tiny_shards,
        tmp_path,
        design="orthogonal",
        ranks=2,
        name="run",
        telemetry__attention_every=EVERY,
        parallel__tensor_model_parallel_size=2,
        parallel__sequence_parallel=True,
    )
    for record, other in zip(measured(alone), measured(run), strict=True):
        assert record == pytest.approx(other, rel=1e-5)


def test_a_synthesizer_has_no_scores(tiny_shards: Path, tmp_path: Path) -> None:
    run = trained(
        tiny_shards,
        tmp_path,
        design="synthesizer_random",
        ranks=1,
        name="run",
        telemetry__attention_every=EVERY,
    )
    record = measured(run)[1]
    assert len(ATTENTION_ENTROPY.members(record)) == len(ATTENTION_SCALE.members(record)) == 2
    assert not LARGEST_SCORE.members(record)
