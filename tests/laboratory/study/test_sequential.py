"""The sequential paired t-test: its level over all looks, its answers, and the pairs it plans
for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from laboratory.study.hypothesis import Hypothesis
from laboratory.study.sequential import (
    EXPONENT,
    FIRST,
    KAPPA,
    LAST,
    NO,
    YES,
    bounds,
    decide,
    pairs_needed,
)

BETTER = Hypothesis("new", "better", 2.0, "old")
WITHIN = Hypothesis("new", "within", 2.0, "old")


@pytest.mark.parametrize("level", [YES, NO])
def test_all_looks_together_are_wrong_no_more_often_than_the_level(level: float) -> None:
    """Against scipy's own t-test at every look; 4,000 sequences, so three standard errors are 1.0
    %."""
    noise = np.random.default_rng(3).standard_normal((4000, LAST))
    wrong = np.zeros(4000, dtype=bool)
    for n in range(FIRST, LAST + 1):
        p = stats.ttest_1samp(noise[:, :n], 0, axis=1, alternative="greater").pvalue
        wrong |= p <= KAPPA[level] / n**EXPONENT
    assert 0.6 * level < wrong.mean() < level + 3 * math.sqrt(level * (1 - level) / 4000)


def test_a_bound_is_where_scipys_test_gives_the_p_value_of_the_look() -> None:
    differences = np.random.default_rng(1).normal(0.03, 0.02, 9)
    low, high = bounds(differences.tolist(), YES)
    for bound, side in ((low, "greater"), (high, "less")):
        p = stats.ttest_1samp(differences, bound, alternative=side).pvalue
        assert p == pytest.approx(KAPPA[YES] / 9**EXPONENT)
    assert bounds(differences[: FIRST - 1].tolist(), YES) == (-math.inf, math.inf)


def test_the_first_answer_stays_whatever_comes_after() -> None:
    clear = [-0.05, -0.06, -0.055, -0.052, -0.058]
    decision = decide(clear, BETTER)
    assert (decision.answer, decision.n) == ("yes", 5) and decision.high < 0
    assert decide([*clear, 0.5, 0.5, 0.5], BETTER) == decision
    assert decide(clear[:4], BETTER).answer is None and math.isinf(decide(clear[:4], BETTER).low)
    assert decide([-value for value in clear], BETTER).answer == "no"
    assert decide(clear, Hypothesis("new", "worse", 2.0, "old")).answer == "no"
    assert decide(clear, WITHIN).answer == "no"  # 5 % lower is outside ± 2 %
    assert decide([0.001, -0.001, 0.002, 0.0, -0.002], WITHIN).answer == "yes"
    assert decide([0.02, -0.02, 0.03, 0.01, -0.03], WITHIN).answer is None
    assert decide([], WITHIN).n == 0 and decide([], BETTER).n == 0


def test_equal_differences_answer_no_question_of_more_or_less() -> None:
    """As losses of two decimals have them; there is no spread to test against."""
    equal = [2.95 - 3.0, 3.05 - 3.1, 3.15 - 3.2, 3.25 - 3.3, 3.35 - 3.4]
    decision = decide(equal, BETTER)
    assert decision.answer is None and math.isinf(decision.low) and math.isinf(decision.high)
    assert decide([*equal, -0.06], BETTER).answer == "yes"
    assert decide([0.0] * 5, WITHIN).answer == "yes"


@pytest.mark.slow
@pytest.mark.distributed
def test_planned_pairs_answer_yes_in_95_percent() -> None:
    """Simulated at the planned effect: a gap of twice the margin, and no gap for `within`."""
    margin = -math.log(0.98)
    generator = np.random.default_rng(4)
    for hypothesis, truth in ((BETTER, 2 * math.log(0.98)), (WITHIN, 0.0)):
        needed = pairs_needed(margin, hypothesis)
        assert 13 < needed < 40
        trials = truth + margin * generator.standard_normal((400, needed))
        answers = [decide(trial.tolist(), hypothesis).answer for trial in trials]
        assert answers.count("yes") > 0.93 * 400
    assert pairs_needed(100.0, BETTER) == LAST and pairs_needed(0.0, BETTER) == FIRST
