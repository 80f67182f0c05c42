"""Answers of a hypothesis to intervals of the gap, and seeds that a seal can state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from laboratory.study.hypothesis import Hypothesis
from laboratory.study.sealed import seed_settings
from pretrain.errors import UserError


@pytest.mark.parametrize(
    ("question", "yes", "no", "answer"),
    [
        ("better", (-0.5, -0.1), (-0.1, 0.1), "yes"),
        ("better", (-0.5, -0.01), (-0.5, -0.01), None),
        ("better", (-0.015, -0.01), (-0.015, -0.01), "no"),
        ("better", (-0.5, 0.0), (-0.04, 0.1), None),
        ("better", (-0.5, 0.0), (-0.01, 0.1), "no"),
        ("worse", (0.1, 0.5), (0.0, 0.1), "yes"),
        ("worse", (0.01, 0.5), (0.01, 0.5), None),
        ("worse", (0.01, 0.015), (0.01, 0.015), "no"),
        ("worse", (0.0, 0.5), (-0.5, 0.03), None),
        ("worse", (0.0, 0.5), (-0.5, 0.01), "no"),
        ("within", (-0.01, 0.01), (-1, 1), "yes"),
        ("within", (-0.01, 0.03), (-0.01, 0.03), None),
        ("within", (-0.01, 0.03), (0.03, 0.04), "no"),
        ("within", (-0.04, 0.01), (-0.04, -0.03), "no"),
    ],
)
def test_answers_of_a_hypothesis(
    question: Any, yes: tuple[float, float], no: tuple[float, float], answer: str | None
) -> None:
    assert Hypothesis("new", question, 2.0, "old").answer(yes, no) == answer


def test_the_edges_are_not_part_of_an_answer() -> None:
    within = Hypothesis("new", "within", 2.0, "old")
    lower, upper = within.edges
    assert (lower, upper) == (pytest.approx(np.log(0.98)), pytest.approx(np.log(1.02)))
    assert within.answer((-0.01, upper), (-0.01, upper)) is None
    assert within.answer((lower, 0.01), (lower, 0.01)) is None
    assert within.answer((upper, 1.0), (upper, 1.0)) is None
    assert within.answer((-1.0, lower), (-1.0, lower)) is None
    worse = Hypothesis("new", "worse", 2.0, "old")
    assert worse.answer((upper, 1.0), (-1.0, upper)) is None
    better = Hypothesis("new", "better", 2.0, "old")
    assert better.answer((-1.0, lower), (lower, 1.0)) is None
    assert better.answered("no", "") == "Is new more than 2 % better than old? No"
    assert str(Hypothesis.parse("new within 0.5% of old")) == "new within 0.5 % of old"
    assert within.answered("no", "") == "Is new within ± 2 % of old? No"


@pytest.mark.parametrize(("question", "sign"), [("better", -1), ("worse", 1)])
def test_without_a_margin_any_difference_is_the_claim(question: str, sign: int) -> None:
    claim = Hypothesis.parse(f"new {question} than old")
    assert claim == Hypothesis("new", question, 0.0, "old")
    assert str(claim) == f"new {question} than old"
    small, large = sorted((sign * 0.001, sign * 0.5))
    assert claim.answer((small, large), (small, large)) == "yes"
    assert claim.answer((-large, -small), (-large, -small)) == "no"
    assert claim.answer((-0.1, 0.1), (-0.1, 0.1)) is None
    assert claim.answered("yes", "") == f"Is new {question} than old? Yes"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("new within of old", "must be above 0"),
        ("new within 0% of old", "must be above 0"),
        ("new within 100% of old", "below 100 percent"),
        ("new is nice", "is not a hypothesis; write 'VARIANT"),
        ("new better 1.2.3% than old", "is not a hypothesis"),
    ],
)
def test_what_is_no_hypothesis(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Hypothesis.parse(text)


def test_a_seed_that_changes_otherwise_than_the_runs_own_cannot_be_sealed() -> None:
    def config(run: int, data: int) -> dict[str, Any]:
        every = {key[:-5]: {"seed": data} for key in ("data.seed", "attention.seed")}
        return {**every, "run": {"seed": run}}

    with pytest.raises(
        UserError, match=r"runs of one variant have several .* nothing can be sealed"
    ):
        seed_settings([config(1, 5), config(2, 6)])
    assert set(seed_settings([config(1, 1), config(2, 2)]).values()) == {None}
    assert 5 in seed_settings([config(1, 5), config(2, 5)]).values()
    assert 5 in seed_settings([config(1, 5)]).values()
