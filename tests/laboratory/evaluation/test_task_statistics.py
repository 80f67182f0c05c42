"""Gaps and report of `evaluate tasks` on fabricated scores; no model, no harness."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("transformers", reason="transformers is of the extra export")

from laboratory.evaluation.tasks.harness import Score, read_scores
from laboratory.evaluation.tasks.report import compare_tasks, tasks_document
from laboratory.finetuning.models import Pretrained
from laboratory.study.report import Document, page_text
from laboratory.study.seeds import group_runs

ITEMS = 40
FACTS = {
    "versions": {"lm-eval": "0.4.13"},
    "tasks": {"choice": {"version": 1.0, "shots": 0, "items": ITEMS}},
}


def fabricated(seeds: int) -> tuple[Document, list]:
    """Models with 40 items, of which `orthogonal` has one less right, or as many, by turns."""
    models, scores = [], {}
    for variant, fewer in (("orthogonal", 1), ("vanilla", 0)):
        for seed in range(1, seeds + 1):
            path = Path(f"{variant}-{seed}")
            facts = {"variant": variant, "seed": seed, "step": 6, "attention": {}}
            fields = {"facts": facts, "digest": "", "trusted": True, "name": path.name}
            models.append(Pretrained(path, path, **fields))
            right = 20 + seed - fewer * (seed % 2)
            items = tuple([1.0] * right + [0.0] * (ITEMS - right))
            perplexity = Score(10.0 + seed + fewer, 0.5, False)
            acc = Score(right / ITEMS, 0.08, True, items)
            scores[path] = {"choice": {"perplexity": perplexity, "acc": acc}}
    groups = group_runs(models, "vanilla")
    return tasks_document(groups, scores, FACTS, None), list(compare_tasks(groups, scores))


def test_gaps_by_seed_and_by_item() -> None:
    _, (by_seed, by_item) = fabricated(5)
    other, tested = by_seed
    assert [(contrast.metric, contrast.tested) for contrast in by_seed] == [
        ("perplexity", False),
        ("acc", True),
    ]
    differences = -np.array([1, 0, 1, 0, 1]) / ITEMS
    half = stats.t.ppf(0.975, 4) * differences.std(ddof=1) / 5**0.5
    assert tested.gap.differences == pytest.approx(differences)
    assert (tested.gap.low, tested.gap.high) == pytest.approx((-0.015 - half, -0.015 + half))
    p = stats.ttest_1samp(differences, 0).pvalue
    assert tested.gap.t_p == tested.gap.t_p_holm == pytest.approx(p)
    assert other.gap.mean == pytest.approx(1) and other.gap.t_p is None
    assert [(contrast.gap.n, contrast.gap.mean * ITEMS) for contrast in by_item] == [
        (ITEMS, pytest.approx(-(seed % 2))) for seed in range(1, 6)
    ]


def test_the_report_says_what_was_compared() -> None:
    document, _ = fabricated(5)
    text = page_text(document.page)
    assert "# Tasks\n\nBaseline: vanilla. lm-eval 0.4.13.\n" in text
    said = "* choice: orthogonal: acc -0.0150 (95 % interval -0.0320 to +0.0020) against vanilla;"
    assert said in text and "Fewer than" not in text
    assert "| choice | acc ↑ | vanilla | 5 | 0.5750 ± 0.0395 | 0.0800 |" in text
    assert "| choice | perplexity | orthogonal | 5 | +1.0000 | [+1.0000, +1.0000] |" in text
    assert "| choice | acc | orthogonal-1 | 40 | -0.0250 | [-0.0756, +0.0256] |" in text
    model = document.content["models"][0]
    assert model["tasks"]["choice"]["acc"] == {
        "value": 21 / 40,
        "stderr": 0.08,
        "higher_is_better": True,
    }
    assert "seeds" not in document.content["items"][0]["gap"]


def test_few_seeds_have_no_p_values() -> None:
    document, _ = fabricated(2)
    text = page_text(document.page)
    assert "| n < 5 | n < 5 | n < 5 | n < 5 |" in text
    assert "Fewer than 5 pairs of seeds: no statistical significance is claimed" in text


def test_a_model_of_unknown_seed_is_no_pair_of_seed_zero() -> None:
    models, scores = [], {}
    for name, facts in (("run", {"variant": "vanilla", "seed": 0}), ("theirs", {})):
        path = Path(name)
        models.append(Pretrained(path, path, facts=facts, digest="", trusted=True, name=name))
        scores[path] = {"choice": {"acc": Score(0.5, 0.1, True, (1.0, 0.0))}}
    by_seed, by_item = compare_tasks(group_runs(models, "vanilla"), scores)
    assert [contrast.gap for contrast in by_seed] == [None]
    assert [contrast.gap.n for contrast in by_item if contrast.gap] == [2]  # as the only two models


def test_parts_of_a_group_without_a_number_are_shown() -> None:
    """A tag, or a group without aggregation: the harness has results of its tasks only."""
    sample = {"filter": "none", "acc": 1.0}
    results = {
        "results": {
            "suite": {"alias": "suite"},
            "one": {"acc,none": 1.0, "acc_stderr,none": "N/A", "alias": "one"},
            "sum": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "sum"},
            "two": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "two"},
        },
        "groups": {"sum": {}},
        "group_subtasks": {"suite": ["one"], "sum": ["two"], "one": [], "two": []},
        "samples": {"one": [sample], "two": [sample, sample]},
        "higher_is_better": {"one": {"acc": True}, "two": {"acc": True}},
    }
    scores = read_scores(results)
    assert list(scores) == ["one", "sum"]
    assert scores["one"]["acc"] == Score(1.0, None, True, (1.0,))
    assert scores["sum"]["acc"].items == (1.0, 1.0)
