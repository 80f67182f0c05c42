"""Statistics and report of `evaluate tasks` on fabricated scores; no model, no harness."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("transformers", reason="transformers is of the extra export")

from laboratory.evaluation.tasks.harness import Measured
from laboratory.evaluation.tasks.report import TaskReport
from laboratory.evaluation.tasks.scores import Score, TaskScores
from laboratory.evaluation.tasks.statistics import Scores, compare_tasks, mcnemar
from laboratory.finetuning.models import Pretrained
from laboratory.study.report import page_text
from laboratory.study.seeds import group_runs
from pretrain.reporting.tables import Table

ITEMS = 40


def fabricated(seeds: int) -> TaskReport:
    """Models with 40 items, of which `orthogonal` has one less right, or as many, by turns."""
    models, scores = [], {}
    for variant, fewer in (("orthogonal", 1), ("vanilla", 0)):
        for seed in range(1, seeds + 1):
            path = Path(f"{variant}-{seed}")
            facts = {"variant": variant, "seed": seed, "step": 6, "attention": {}}
            own = {"facts": facts, "digest": "", "trusted": True, "name": path.name}
            models.append(Pretrained(path, path, **own))
            right = 20 + seed - fewer * (seed % 2)
            items = tuple([1.0] * right + [0.0] * (ITEMS - right))
            perplexity = Score(10.0 + seed + fewer, 0.5, False, tuple(map(float, range(ITEMS))))
            choice = {"acc": Score(right / ITEMS, 0.08, True, items), "perplexity": perplexity}
            scores[path] = {"choice": TaskScores(choice, ITEMS, cut=seed)}
    all_scores: Scores = scores
    groups = group_runs(models, "vanilla")
    return TaskReport(
        comparison=compare_tasks(groups, all_scores),
        groups=groups,
        measured=[Measured("choice", ())],
        scores=all_scores,
        limit=None,
        versions={"lm-eval": "0.4.13"},
        command=[("python", "-m", "pretrain"), ("--tasks", "choice, both")],
    )


def test_gaps_and_items_of_five_seeds() -> None:
    report = fabricated(5)
    tested, other = report.comparison.contrasts
    assert [(one.metric, one.tested) for one in (tested, other)] == [
        ("acc", True),
        ("perplexity", False),
    ]
    differences = -np.array([1, 0, 1, 0, 1]) / ITEMS
    assert tested.gap is not None and other.gap is not None
    assert tested.gap.differences == pytest.approx(differences)
    half = stats.t.ppf(0.975, 4) * differences.std(ddof=1) / 5**0.5
    assert (tested.gap.low, tested.gap.high) == pytest.approx((-0.015 - half, -0.015 + half))
    assert (
        tested.gap.t_p
        == tested.gap.t_p_holm
        == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    )
    assert other.gap.mean == pytest.approx(1) and other.gap.t_p is None
    assert [
        (one.only_model, one.only_base, one.p_holm) for one in report.comparison.item_tests
    ] == [(0, seed % 2, 1.0) for seed in range(1, 6)]


def test_the_report_says_what_was_compared() -> None:
    document = fabricated(5).document()
    text = page_text(document.page)
    assert "# Tasks\n\nBaseline: vanilla. lm-evaluation-harness 0.4.13.\n" in text
    assert (
        "* choice: orthogonal: acc -0.0150 (95 % interval -0.0320 to +0.0020) against vanilla; no "
        "sig" in text
    )
    assert "| choice | acc ↑ | vanilla | 5 | 0.5750 ± 0.0395 | 0.0800 | 40 |" in text
    assert (
        "| choice | acc | orthogonal | 5 | -0.0150 | [-0.0320, +0.0020] | -1.10 | 0.0705 | 0.0705 |"
        in text
    )
    assert "| choice | perplexity | orthogonal | 5 | +1.0000 | [+1.0000, +1.0000] |" in text
    assert (
        "lose their beginning, here up to 5 of choice a model" in text and "Fewer than" not in text
    )
    assert "```\npython -m pretrain \\\n    --tasks 'choice, both'\n```" in text
    assert [block.header[-1] for block in document.summary if isinstance(block, Table)] == [
        "items",
        "p, Holm",
    ]
    model = document.content["models"][0]
    assert model["tasks"]["choice"]["scores"]["acc"] == {
        "value": 21 / 40,
        "stderr": 0.08,
        "higher_is_better": True,
    }
    assert "perplexity_ratio" not in document.content["contrasts"][0]["gap"]


def test_a_model_of_unknown_seed_is_no_pair_of_seed_zero() -> None:
    models, scores = [], {}
    for name, facts in (("run", {"variant": "vanilla", "seed": 0}), ("theirs", {})):
        path = Path(name)
        models.append(Pretrained(path, path, facts=facts, digest="", trusted=True, name=name))
        scores[path] = {"choice": TaskScores({"acc": Score(0.5, 0.1, True, (1.0, 0.0))}, 2)}
    comparison = compare_tasks(group_runs(models, "vanilla"), scores)
    assert [one.gap for one in comparison.contrasts] == [None]
    assert [one.items for one in comparison.item_tests] == [2]  # as the only two models


def test_few_seeds_have_no_p_values() -> None:
    text = page_text(fabricated(2).document().page)
    assert "| n < 5 | n < 5 | n < 5 | n < 5 | n = 2 < 5: significance is not claimed |" in text
    assert "Fewer than 5 pairs of seeds (n = 2): no statistical significance is claimed" in text


def test_mcnemar_by_hand() -> None:
    # 6 items that only one has right, 1 to 5: 2 (C(6,0) + C(6,1)) / 2^6.
    ours = [1.0] + [0.0] * 5 + [1.0] * 3 + [0.0] * 2
    base = [0.0] + [1.0] * 5 + [1.0] * 3 + [0.0] * 2
    assert mcnemar(ours, base) == (1, 5, pytest.approx(float(Fraction(14, 64))))
    assert mcnemar(base, ours) == (5, 1, pytest.approx(float(Fraction(14, 64))))
    assert mcnemar(ours, base)[2] == pytest.approx(stats.binomtest(1, 6).pvalue)
    assert mcnemar([1.0] * 8, [0.0] * 8) == (8, 0, pytest.approx(2 / 256))
    assert mcnemar([1.0, 0.0], [0.0, 1.0]) == (1, 1, 1.0) and mcnemar([1.0], [1.0]) == (0, 0, 1.0)
    with pytest.raises(ValueError):
        mcnemar([1.0], [1.0, 0.0])
