"""Report of fine-tunings beside a baseline, in points: 100 is the best, and files keep parts of 1.

A pair is two pretrainings of the same seed, each the mean over its fine-tunings, where two seeds or
more were pretrained of both; else two fine-tunings of the same seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from pydantic import FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.io.forms import Count
from laboratory.study.gaps import POINTS, PairedGap, adjusted, paired_gap, with_gap
from laboratory.study.report import Report, Verdict, seeds_text, text_table
from laboratory.study.tables import EFFECT, GAP, INTERVAL, ROW_CLAIM, T_HOLM, T_P, GapRow, gap_table
from pretrain.reporting.tables import Table
from pretrain.reporting.text import number

TOLERANCE = 0.05
"""Criterion of the method's proposal: the part of the baseline's value that a pair may lose."""
Pair: TypeAlias = Literal["pretraining", "fine-tuning"]


class Result(TypedDict):
    """Result of one fine-tuning.

    Attributes:
        metrics: {metric: value}, 1 the best; `score` is GLUE's.
        items: Number of items that were scored.
        best_epoch: Epoch of the weights that were scored.
        score_aside_by_epoch: Scores that chose this epoch.
        frozen_parameters: How many of all `parameters` were frozen.
        seconds: Seconds of training.
    """

    metrics: dict[str, FiniteFloat]
    items: Count
    best_epoch: Count
    score_aside_by_epoch: list[FiniteFloat]
    frozen_parameters: Count
    parameters: Count
    seconds: FiniteFloat


RESULT = TypeAdapter(Result)


@dataclass(frozen=True)
class Trial:
    """One fine-tuning of one model on one task.

    Attributes:
        group: Name of the variant or arm.
        model: Name of the model.
        pretraining_seed: None where it is not known.
        seed: Seed of the fine-tuning.
        kept: Whether the result was on disk already.
    """

    task: str
    group: str
    model: str
    pretraining_seed: int | None
    seed: int
    kept: bool
    result: Result


@dataclass(frozen=True)
class Comparison:
    """Gap of a group to the baseline on one task by one metric.

    Attributes:
        pair: Kind of pairs that the gap is over.
        gap: None without a seed in common.
        held: Number of pairs in which the criterion held; None if a value of the baseline is not
            above 0.
    """

    task: str
    metric: str
    group: str
    pair: Pair
    gap: PairedGap | None
    held: int | None


@dataclass(frozen=True)
class Study:
    """Subject of a report.

    Attributes:
        experiment: Number of the experiment, such as E3.
        baseline: Name of the group that the others are compared with.
        metrics: Metrics that are compared; the first one decides whether the criterion held.
        notes: Notes of the report beside those that every report has.
    """

    experiment: str
    title: str
    baseline: str
    metrics: Sequence[str]
    notes: Sequence[str]


def compare_trials(
    trials: Sequence[Trial], baseline: str, metrics: Sequence[str]
) -> list[Comparison]:
    """Compare every group with the baseline on every task, corrected over all comparisons.

    Args:
        baseline: Name of a group.
        metrics: Metrics that are compared.
    """
    groups = _grouped(trials)
    comparisons = [
        _compare(metric, members, groups[task, baseline])
        for metric in metrics
        for (task, group), members in groups.items()
        if group != baseline
    ]
    return adjusted(comparisons)


def _grouped(trials: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """Return {(task, group): its trials}, all in the order of the trials."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.task, trial.group), []).append(trial)
    return groups


def _compare(metric: str, members: Sequence[Trial], base: Sequence[Trial]) -> Comparison:
    common = {t.pretraining_seed for t in members} & {t.pretraining_seed for t in base} - {None}
    if common:  # only these are of the same samples in the same order
        members = [trial for trial in members if trial.pretraining_seed in common]
        base = [trial for trial in base if trial.pretraining_seed in common]
    pair: Pair = "pretraining" if len(common) >= 2 else "fine-tuning"
    values, base_values = (_means(side, metric, pair) for side in (members, base))
    gap = None
    if common or all(len({trial.model for trial in side}) == 1 for side in (members, base)):
        gap = paired_gap(base[0].group, values, base_values, POINTS)
    held = None
    if gap and all(base_values[seed] > 0 for seed in gap.seeds):
        held = sum(values[seed] >= (1 - TOLERANCE) * base_values[seed] for seed in gap.seeds)
    return Comparison(members[0].task, metric, members[0].group, pair=pair, gap=gap, held=held)


def _means(trials: Sequence[Trial], metric: str, pair: Pair) -> dict[int, float]:
    """Return {seed of the pretraining or fine-tuning: mean of its values}."""
    values: dict[int, list[float]] = {}
    for trial in trials:
        seed = trial.pretraining_seed if pair == "pretraining" else trial.seed
        assert seed is not None
        values.setdefault(seed, []).append(trial.result["metrics"][metric])
    return {seed: statistics.fmean(of_seed) for seed, of_seed in values.items()}


def fine_tuned_report(study: Study, trials: Sequence[Trial], content: Mapping[str, Any]) -> Report:
    """Return the report of all trials.

    Args:
        content: Further content of report.json.
    """
    baseline = study.baseline
    judged = study.metrics[0]
    comparisons = compare_trials(trials, baseline, study.metrics)
    verdicts = [_verdict(one) for one in comparisons if one.metric == judged]
    alone = Verdict(baseline, len(trials), None, "nothing to compare with")
    return Report(
        study.experiment,
        study.title,
        criterion=f"{judged} ≥ {100 * (1 - TOLERANCE):g} % of {baseline}'s, pair by pair",
        verdicts=verdicts or [alone],
        tables=[_scores(trials), *([_gaps(comparisons, baseline)] if comparisons else [])],
        notes=[*_notes(trials, comparisons), *study.notes],
        content={
            "baseline": baseline,
            "tolerance": TOLERANCE,
            "comparisons": [with_gap(comparison) for comparison in comparisons],
            "trials": [asdict(trial) for trial in trials],
            **content,
        },
    )


def _verdict(comparison: Comparison) -> Verdict:
    name = f"{comparison.group}, {comparison.task}"
    gap = comparison.gap
    if gap is None:
        return Verdict(name, 0, None, "no seed in common with the baseline")
    numbers = f"{POINTS.signed(gap.mean)} points {POINTS.interval(gap)}"
    return Verdict(name, gap.n, comparison.held, numbers)


def _scores(trials: Sequence[Trial]) -> Table:
    rows = []
    for (task, group), members in _grouped(trials).items():
        results = [trial.result for trial in members]
        first = results[0]
        points = [
            f"{name} {seeds_text([100 * result['metrics'][name] for result in results], 2)}"
            for name in first["metrics"]
        ]
        models = len({trial.model for trial in members})
        row = (
            task,
            group,
            f"{models} × {len(members) // models}",
            ", ".join(points),
            seeds_text([result["best_epoch"] for result in results], 1),
            f"{100 * first['frozen_parameters'] / first['parameters']:.1f} %",
            str(first["items"]),
        )
        rows.append(row)
    header = ("task", "variant", "models × seeds", "points", "best epoch", "frozen", "items")
    return text_table("Scores, in points", header, rows)


def _gaps(comparisons: Sequence[Comparison], baseline: str) -> Table:
    rows = []
    for comparison in comparisons:
        pairs = f"{comparison.gap.n if comparison.gap else 0} of {comparison.pair}"
        names = (comparison.task, comparison.metric, comparison.group, pairs)
        rows.append(GapRow(names, comparison.gap, comparison.metric))
    return gap_table(
        ("task", "metric", "variant", "pairs"),
        rows,
        (GAP, INTERVAL, EFFECT, T_P, T_HOLM, ROW_CLAIM),
        title=f"Gaps to {baseline}, in points; below 0 is worse",
    )


def _errors_of_accuracy(trials: Sequence[Trial]) -> list[str]:
    """Return a clause on each task's standard error over the choice of its items."""
    by_task: dict[str, list[float]] = {}
    items = {trial.task: trial.result["items"] for trial in trials}
    for trial in trials:
        if (accuracy := trial.result["metrics"].get("accuracy")) is not None:
            by_task.setdefault(trial.task, []).append(accuracy)
    means = {task: statistics.fmean(accuracies) for task, accuracies in by_task.items()}
    errors = {task: 100 * (p * (1 - p) / items[task]) ** 0.5 for task, p in means.items()}
    return [f"{number(error, 2)} points on {task}" for task, error in errors.items()]


def _notes(trials: Sequence[Trial], comparisons: Sequence[Comparison]) -> list[str]:
    notes = ["± is the standard deviation over fine-tunings"]
    if errors := _errors_of_accuracy(trials):
        notes.append(
            "over the choice of items the standard error of one model's accuracy, √(p (1 − p) / n),"
            f" is {', '.join(errors)}: a smaller gap says little about other items"
        )
    if "fine-tuning" in {comparison.pair for comparison in comparisons}:
        notes.append(
            "pairs of fine-tuning seeds of one pretrained model: the interval is of this "
            "pretraining, not of the method; for that, pretrain several seeds of both variants"
        )
    return notes
