"""Report of fine-tunings: which seeds are paired, what is compared, what the report says."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from laboratory.finetuning.report import Result, Study, Trial, compare_trials, fine_tuned_report
from laboratory.study.report import page_text


def trial(
    group: str, pretraining: int | None, seed: int, score: float, task: str = "sst2"
) -> Trial:
    result: Result = {
        "metrics": {"accuracy": score, "score": score},
        "items": 872,
        "best_epoch": 2,
        "score_aside_by_epoch": [0.5, score],
        "frozen_parameters": 129,
        "parameters": 1000,
        "seconds": 1.0,
    }
    model = f"{group}-{pretraining}"
    return Trial(task, group, model, pretraining, seed=seed, kept=False, result=result)


def test_pairs_are_of_pretraining_seeds_where_there_are_several() -> None:
    base = [trial("a", p, s, 0.9 + 0.01 * p + 0.001 * s) for p in (1, 2, 3) for s in (1, 2)]
    group_b = [trial("b", p, s, 0.9 + 0.02 * p + 0.001 * s) for p in (1, 2, 4) for s in (1, 2)]
    (comparison,) = compare_trials([*base, *group_b], "a", ["score"])
    assert comparison.pair == "pretraining" and comparison.gap is not None
    assert comparison.gap.seeds == (1, 2) and comparison.gap.differences == pytest.approx(
        (0.01, 0.02)
    )
    half = stats.t.ppf(0.975, 1) * math.sqrt(0.00005) / math.sqrt(2)
    assert (comparison.gap.low, comparison.gap.high) == pytest.approx((0.015 - half, 0.015 + half))
    assert comparison.held == 2


def test_pairs_are_of_fine_tuning_seeds_of_one_pretraining() -> None:
    base = [trial("a", 7, s, 0.9) for s in (1, 2, 3)]
    group_b = [trial("b", 7, s, value) for s, value in ((1, 0.9), (2, 0.84), (3, 0.86))]
    group_b += [trial("b", 8, s, 0.1) for s in (1, 2, 3)]  # of other samples in another order
    (comparison,) = compare_trials([*base, *group_b], "a", ["score"])
    assert comparison.pair == "fine-tuning" and comparison.gap is not None and comparison.gap.n == 3
    assert comparison.gap.differences == pytest.approx((0, -0.06, -0.04)) and comparison.held == 2
    foreign = [trial("c", None, s, 0.9) for s in (1, 2, 3)]
    (other,) = compare_trials([*base, *foreign], "a", ["score"])
    assert other.gap is not None and other.gap.n == 3 and other.held == 3
    two = [trial("d", p, s, 0.9) for p in (8, 9) for s in (1, 2, 3)]
    (mixed,) = compare_trials([*base, *two], "a", ["score"])
    assert mixed.gap is None  # a mean over two pretrainings has no pair


def test_p_values_are_adjusted_over_tasks_and_groups() -> None:
    drawn = random.Random(0)
    trials = [
        trial(group, 1, seed, score=0.8 + 0.01 * drawn.random(), task=task)
        for task in ("sst2", "rte")
        for group in ("a", "b", "c")
        for seed in (1, 2, 3)
    ]
    comparisons = compare_trials(trials, "a", ["score"])
    assert [(comparison.task, comparison.group) for comparison in comparisons] == [
        (t, g) for t in ("sst2", "rte") for g in "bc"
    ]
    smallest = min(comparison.gap.t_p for comparison in comparisons if comparison.gap)
    assert min(
        comparison.gap.t_p_holm for comparison in comparisons if comparison.gap
    ) == pytest.approx(min(1, 4 * smallest))


def test_the_report_says_what_was_compared() -> None:
    trials = [trial(group, 1, seed, 0.9) for group in ("a", "b") for seed in (1, 2)]
    trials += [trial("a", 1, 1, score=0.0, task="cola"), trial("b", 1, 1, score=0.3, task="cola")]
    study = Study("E3", "GLUE", "a", ["score"], notes=["a note"])
    report = fine_tuned_report(study, trials, {"more": 1})
    assert [(v.group, v.answer) for v in report.verdicts] == [
        ("b, sst2", "yes (2 of 2)"),
        ("b, cola", "not testable"),  # 95 % of nothing
    ]
    text = page_text(report.document().page)
    assert "score ≥ 95 % of a's" in text and "a note" in text
    assert "(1 − p) / n), is 1.02 points on sst2, 1.21 points on cola: a smaller" in text
    scores = "accuracy 90.00 ± 0.00, score 90.00 ± 0.00 | 2.0 ± 0.0 | 12.9 % | 872 |"
    assert f"| sst2 | b | 1 × 2 | {scores}" in text
    gap = "| sst2 | score | b | 2 of fine-tuning | +0.00 | [+0.00, +0.00] | – | n < 5 | n < 5 |"
    assert gap in text
    assert "not of the method" in text and "n = 2 < 5: significance is not claimed" in text
    alone = fine_tuned_report(study, trials[:2], {})
    assert [v.answer for v in alone.verdicts] == ["not testable"] and len(alone.tables) == 1
