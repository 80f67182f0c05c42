"""Arms of the head-wise test on BERT, and how they are compared."""

from __future__ import annotations

import numpy as np
import pytest

from pretrain.errors import UserError
from pretrain.finetuning.bert.arms import Condition, arms, layers_of
from pretrain.finetuning.bert.report import pairs
from pretrain.finetuning.report import Trial, compare_trials


def test_arms_have_one_baseline_and_every_condition_in_every_range() -> None:
    found = arms([Condition.unfrozen, Condition.frozen, Condition.gaussian], ["0", "50%-100%"])
    assert [arm.name for arm in found] == [
        "unfrozen",
        *("frozen, layers 0", "gaussian, layers 0"),
        *("frozen, layers 50%-100%", "gaussian, layers 50%-100%"),
    ]
    assert len({arm.file_name for arm in found}) == 5
    assert layers_of("all", 3) == range(3)
    with pytest.raises(UserError, match="no layer at all"):
        layers_of("0%-10%", 2)


def test_arms_are_compared_in_pairs() -> None:
    """Accuracies by hand: +2, 0, +1, +2, 0 points, whose mean is 1 and sd 1."""
    base = [0.5, 0.6, 0.7, 0.8, 0.9]
    gains = {Condition.unfrozen: [0.0] * 5, Condition.frozen: [0.01] * 5}
    gains[Condition.orthonormal] = [0.02, 0.0, 0.01, 0.02, 0.0]
    chosen = arms(list(gains), ["all"])
    trials = [
        Trial("sst2", arm.name, "bert", None, seed, b + g, {}, 0.0, 100)
        for arm in chosen
        for seed, (b, g) in enumerate(zip(base, gains[arm.condition], strict=True))
    ]
    found = {(c.group, c.control): c.gap for c in compare_trials(trials, "unfrozen", 0.05, pairs(chosen))}
    assert set(found) == {("frozen", "unfrozen"), ("orthonormal", "unfrozen"), ("orthonormal", "frozen")}
    gap, beside = found["orthonormal", "unfrozen"], found["orthonormal", "frozen"]
    assert gap is not None and beside is not None
    half = 2.7764451051977987 * 0.01 / 5**0.5
    assert np.allclose([gap.mean, gap.low, gap.high], [0.01, 0.01 - half, 0.01 + half])
    assert gap.t_p is not None and gap.t_p_holm == pytest.approx(
        2 * gap.t_p
    )  # the equal ones count for nothing
    assert beside.mean == pytest.approx(0.0)
