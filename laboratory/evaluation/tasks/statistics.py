"""Comparison on tasks: over pairs of seeds, as `compare` does, and item by item between two models.

    gap       mean over seeds of (score of the variant - score of the baseline), with `compare`'s
              interval, tests, effect size and correction. Its uncertainty is that of trainings.
    McNemar   two models on the same items, right or wrong (McNemar 1947). Of the b + c items that
              only one of them has right, how likely is it that a fair coin gives them as unequally
              or more so: p = min(1, 2 P[X <= min(b, c)]), X ~ Binomial(b + c, 1/2), exactly. Its
              uncertainty is that of items.

Of a task's metrics one is tested, or Holm's correction would pay for saying the same thing twice:
`acc` where there is one, else the first that is 0 or 1 for every item, else the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from scipy import stats

from laboratory.evaluation.tasks.scores import TaskScores
from laboratory.finetuning.models import Pretrained
from laboratory.study.gaps import SCORES, PairedGap, adjust, holm, paired_gap
from laboratory.study.seeds import Group, Groups
from pretrain.reporting.text import Spread, spread, spread_of_all

Scores = Mapping[Path, Mapping[str, TaskScores]]
"""{path of the subject: {name in the report: scores}}"""


@dataclass(frozen=True)
class Result:
    """Score of one variant by one metric.

    Attributes:
        task: Name of the task or group.
        metric: Name of the metric.
        variant: Name of the variant.
        higher_is_better: False for a perplexity.
        score: Mean and deviation over the runs.
        stderr: Mean over the runs of the harness's own; None where there is none.
        items: Number of items.
    """

    task: str
    metric: str
    variant: str
    higher_is_better: bool
    score: Spread
    stderr: float | None
    items: int


@dataclass(frozen=True)
class Contrast:
    """Gap of a variant to its baseline by one metric.

    Attributes:
        task: Name of the task or group.
        metric: Name of the metric.
        variant: Name of the variant.
        higher_is_better: False for a perplexity.
        tested: The metric is the one of the task that is tested; others have no p values.
        gap: None without a seed in common.
    """

    task: str
    metric: str
    variant: str
    higher_is_better: bool
    tested: bool
    gap: PairedGap | None


@dataclass(frozen=True)
class ItemTest:
    """McNemar's exact test between a model and one of the baseline.

    Attributes:
        task: Name of the task or group.
        metric: Name of the metric.
        variant: Variant of the model.
        model: Name of the model.
        base: Name of the baseline's model.
        items: Number of items.
        only_model: Items that only the model has right.
        only_base: Items that only the baseline's has right.
        p: Two-sided p value.
        p_holm: Adjusted over all tests of this kind.
    """

    task: str
    metric: str
    variant: str
    model: str
    base: str
    items: int
    only_model: int
    only_base: int
    p: float
    p_holm: float | None = None


@dataclass(frozen=True)
class TaskComparison:
    """Comparison of all groups, task by task, the baseline first.

    Attributes:
        baseline: Name of the baseline.
        results: Scores of all variants by all metrics.
        contrasts: Gaps to the baselines.
        item_tests: McNemar's tests.
    """

    baseline: str
    results: tuple[Result, ...]
    contrasts: tuple[Contrast, ...]
    item_tests: tuple[ItemTest, ...]


def compare_tasks(groups: Groups[Pretrained], scores: Scores) -> TaskComparison:
    """Compare all groups by every task and metric.

    Holm's correction is over all tested contrasts, and over all item tests.

    Args:
        groups: The models by variant.
        scores: {path of a model: {name of a task: scores}}.
    """
    results: list[Result] = []
    contrasts: list[Contrast] = []
    item_tests: list[ItemTest] = []
    for task, task_scores in next(iter(scores.values())).items():
        main = main_metric(task_scores)
        for metric, score in task_scores.scores.items():
            for group in groups.groups:
                results.append(_result(group, scores, task, metric))
                base = groups.baseline_of(group)
                if base.name == group.name:
                    continue
                values, base_values = (
                    _values(side, scores, task, metric) for side in (group, base)
                )
                gap = paired_gap(base.name, values, base_values, SCORES)
                better = score.higher_is_better
                contrasts.append(
                    Contrast(
                        task=task,
                        metric=metric,
                        variant=group.name,
                        higher_is_better=better,
                        tested=metric == main,
                        gap=gap,
                    )
                )
                if metric == main:
                    item_tests += _item_tests(group, base, scores, task=task, metric=metric)
    tested = iter(adjust([contrast.gap for contrast in contrasts if contrast.tested]))
    untested = partial(replace, t=None, t_p=None, wilcoxon=None, wilcoxon_p=None)
    gaps = [
        next(tested) if contrast.tested else contrast.gap and untested(contrast.gap)
        for contrast in contrasts
    ]
    contrasts = [replace(contrast, gap=gap) for contrast, gap in zip(contrasts, gaps, strict=True)]
    adjusted = zip(item_tests, holm([test.p for test in item_tests]), strict=True)
    item_tests = [replace(test, p_holm=p) for test, p in adjusted]
    return TaskComparison(groups.baseline, tuple(results), tuple(contrasts), tuple(item_tests))


def main_metric(task_scores: TaskScores) -> str:
    """Return the metric of a task that is tested."""
    if "acc" in task_scores.scores:
        return "acc"
    zero_one = [name for name, score in task_scores.scores.items() if right_or_wrong(score.items)]
    return next(iter(zero_one or task_scores.scores), "")


def right_or_wrong(items: Sequence[float]) -> bool:
    """Return whether there are items, and every item is 0 or 1."""
    return bool(items) and set(items) <= {0.0, 1.0}


def _values(group: Group[Pretrained], scores: Scores, task: str, metric: str) -> dict[int, float]:
    """Return {seed: finite score}; an unknown seed counts as -1."""
    values = {
        -1 if model.seed is None else model.seed: scores[model.path][task].scores[metric].value
        for model in group.runs
    }
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _result(group: Group[Pretrained], scores: Scores, task: str, metric: str) -> Result:
    whole = [scores[model.path][task] for model in group.runs]
    metric_scores = [task_scores.scores[metric] for task_scores in whole]
    errors = spread_of_all([metric_score.stderr for metric_score in metric_scores])
    score = spread([metric_score.value for metric_score in metric_scores])
    assert score is not None  # a group has a run
    error = errors.mean if errors else None
    return Result(
        task=task,
        metric=metric,
        variant=group.name,
        higher_is_better=metric_scores[0].higher_is_better,
        score=score,
        stderr=error,
        items=whole[0].items,
    )


def _item_tests(
    group: Group[Pretrained], base: Group[Pretrained], scores: Scores, task: str, metric: str
) -> list[ItemTest]:
    """Test pairs of models of equal seed, or the only two models whatever their seeds."""
    by_seed = {model.seed: model for model in base.runs}
    pairs = [(model, by_seed[model.seed]) for model in group.runs if model.seed in by_seed]
    if not pairs and len(group.runs) == len(base.runs) == 1:
        pairs = [(group.runs[0], base.runs[0])]
    tests = []
    for model, other in pairs:
        ours, theirs = (scores[side.path][task].scores[metric].items for side in (model, other))
        if right_or_wrong(ours) and right_or_wrong(theirs):
            only_ours, only_theirs, p = mcnemar(ours, theirs)
            tests.append(
                ItemTest(
                    task=task,
                    metric=metric,
                    variant=group.name,
                    model=model.name,
                    base=other.name,
                    items=len(ours),
                    only_model=only_ours,
                    only_base=only_theirs,
                    p=p,
                )
            )
    return tests


def mcnemar(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int, float]:
    """Test the answers of two models to the same items, exactly.

    Args:
        ours: 1.0 for every item that the one has right, else 0.0.
        theirs: The same of the other.

    Returns:
        How many items only the one, and only the other has right, and the two-sided p value.

    Raises:
        ValueError: the numbers of items differ.
    """
    pairs = list(zip(ours, theirs, strict=True))
    only_ours = pairs.count((1.0, 0.0))
    only_theirs = pairs.count((0.0, 1.0))
    # Twice the tail at equal counts is above 1, as both tails hold the middle.
    if only_ours == only_theirs:
        return only_ours, only_theirs, 1.0
    p = 2 * stats.binom.cdf(min(only_ours, only_theirs), only_ours + only_theirs, 0.5)
    return only_ours, only_theirs, min(1.0, float(p))
