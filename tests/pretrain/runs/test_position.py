"""What a run's numbers usually are.

The statistics, when they are trusted, and that they survive a file.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pretrain.checkpoint.format import about_json, read_about
from pretrain.runs.position import MEMORY, TRUSTED_AFTER, Position, RunningStats
from tests.fabricated_checkpoints import about


def after(values: list[float]) -> RunningStats:
    usual = RunningStats()
    for value in values:
        usual = usual.after(value)
    return usual


def test_the_first_numbers_weigh_alike_and_later_ones_fade() -> None:
    values = np.random.default_rng(0).normal(3.0, 0.5, 4 * MEMORY).tolist()
    early = after(values[:MEMORY])
    assert early.mean == pytest.approx(np.mean(values[:MEMORY]), rel=1e-12)
    assert early.variance == pytest.approx(np.var(values[:MEMORY]), rel=1e-12)
    weights = (1 - 1 / MEMORY) ** np.arange(3 * MEMORY)[::-1] / MEMORY
    expected = (1 - weights.sum()) * early.mean + weights @ values[MEMORY:]
    assert after(values).mean == pytest.approx(expected, rel=1e-12)


def test_a_limit_is_so_many_standard_deviations_above_the_mean_once_enough_is_known() -> None:
    values = [1.0, 3.0] * (TRUSTED_AFTER // 2)
    assert after(values[:-1]).limit(2.0) == math.inf
    assert after(values).limit(2.0) == pytest.approx(4.0)
    assert after(values).limit(None) == math.inf


def test_a_position_is_the_same_after_a_file(tmp_path: Path) -> None:
    position = Position()
    for step in range(1, 50):
        position = position.after_step(8, 256, math.log(1 + step), 1 / step, updated=step % 7 != 0)
    assert (position.usual_loss.steps, position.skipped_steps, position.consumed_samples) == (
        42,
        7,
        392,
    )
    saved = about(position)
    (tmp_path / "checkpoint.json").write_text(about_json(saved))
    assert read_about(tmp_path) == saved
