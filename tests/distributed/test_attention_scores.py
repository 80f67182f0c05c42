"""Entropy, scale and largest score of each layer's attention, measured while a model trains.

Layouts, and that the training does not notice, are in test_weight_norms.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import ATTENTION_ENTROPY, ATTENTION_SCALE, LARGEST_SCORE
from pretrain.training.validation import spread_of_scores
from tests.distributed.designs import design_overrides
from tests.ranks import train_to_end

pytestmark = pytest.mark.slow

EVERY = 2
STEPS = 4
FAMILIES = (ATTENTION_ENTROPY, ATTENTION_SCALE, LARGEST_SCORE)


def measured(shards: Path, runs: Path, design: str) -> list[dict[str, float]]:
    """Train a run of four steps; return what each record has of attention."""
    keys = {"schedule__steps": STEPS, "telemetry__attention_every": EVERY}
    train_to_end(design_overrides(design, shards, runs, "run", **keys), ranks=1)
    return [
        {tag: value for tag, value in record.items() if tag.startswith("attention/")}
        for record in read_metrics(runs / "run/metrics.jsonl")
    ]


def test_every_layer_is_measured_when_asked(tiny_shards: Path, tmp_path: Path) -> None:
    records = measured(tiny_shards, tmp_path, "orthogonal")
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


def test_a_synthesizer_has_no_scores(tiny_shards: Path, tmp_path: Path) -> None:
    record = measured(tiny_shards, tmp_path, "synthesizer_random")[1]
    assert len(ATTENTION_ENTROPY.members(record)) == len(ATTENTION_SCALE.members(record)) == 2
    assert not LARGEST_SCORE.members(record)
