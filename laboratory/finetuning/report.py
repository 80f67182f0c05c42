"""Report of fine-tunings beside a baseline, in points: 100 is the best, and files keep parts of 1.

A pair is two pretrainings of the same seed, each the mean over its fine-tunings, where two seeds or
more were pretrained of both; else two fine-tunings of the same seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from laboratory.study.gaps import FEWEST_SEEDS, POINTS, PairedGap, adjust, gap_content, paired_gap
from laboratory.study.report import Report, Verdict, seeds_text, text_table
from laboratory.study.seeds import by_group
from laboratory.study.tables import EFFECT, GAP, INTERVAL, T_HOLM, T_P, GapRow, gap_table
from pretrain.reporting.tables import Table
from pretrain.reporting.text import number


@dataclass(frozen=True)
class Trial:
    """Scores of one fine-tuning of one model on one task.

    Attributes:
        task: Name of the task.
        group: Name of the variant or arm.
        model: Name of the model.
        pretraining_seed: None where it is not known.
        seed: Seed of the fine-tuning.
        metrics: {metric: value}, 1 the best; `score` is GLUE's.
        items: Number of items.
        best_epoch: Epoch of the weights that were scored.
        frozen_share: Frozen parameters over all.
    """

    task: str
    group: str
    model: str
    pretraining_seed: int | None
    seed: int
    metrics: Mapping[str, float]
    items: int
    best_epoch: int
    frozen_share: float

    MEASURED: ClassVar[tuple[str, ...]] = ("metrics", "items", "best_epoch", "frozen_share")
    """Attributes that are the result of the fine-tuning."""


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
    baseline: str
    pair: Literal["pretraining", "fine-tuning"]
    gap: PairedGap | None
    held: int | None


def compare_trials(
    trials: Sequence[Trial], baseline: str, metrics: Sequence[str], tolerance: float
) -> list[Comparison]:
    """Compare every group with the baseline on every task, corrected over all comparisons.

    Args:
        baseline: Name of a group.
        metrics: Metrics that are compared.
        tolerance: The part of the baseline's value that a pair may lose.
    """
    comparisons = [
        _compare(metric, members, groups[baseline], tolerance)
        for _, groups in _by_task(trials)
        for metric in metrics
        for group, members in groups.items()
        if group != baseline
    ]
    gaps = adjust([comparison.gap for comparison in comparisons])
    return [replace(comparison, gap=gap) for comparison, gap in zip(comparisons, gaps, strict=True)]


def _by_task(trials: Sequence[Trial]) -> Iterator[tuple[str, dict[str, list[Trial]]]]:
    """Yield each task with {group: its trials}, all in the order of the trials."""
    for task in dict.fromkeys(trial.task for trial in trials):
        yield task, by_group(trial for trial in trials if trial.task == task)


def _compare(
    metric: str, members: Sequence[Trial], base: Sequence[Trial], tolerance: float
) -> Comparison:
    common = {t.pretraining_seed for t in members} & {t.pretraining_seed for t in base} - {None}
    if common:  # only these are of the same samples in the same order
        members, base = (
            [trial for trial in trials if trial.pretraining_seed in common]
            for trials in (members, base)
        )
    pair: Literal["pretraining", "fine-tuning"] = (
        "pretraining" if len(common) >= 2 else "fine-tuning"
    )
    values, base_values = (_means(trials, pair, metric) for trials in (members, base))
    gap = paired_gap(base[0].group, values, base_values, POINTS)
    seeds = gap.seeds if gap else ()
    testable = all(base_values[seed] > 0 for seed in seeds)
    held = sum(values[seed] >= (1 - tolerance) * base_values[seed] for seed in seeds)
    return Comparison(
        task=members[0].task,
        metric=metric,
        group=members[0].group,
        baseline=base[0].group,
        pair=pair,
        gap=gap,
        held=held if testable else None,
    )


def _means(trials: Sequence[Trial], pair: str, metric: str) -> dict[int, float]:
    """Return {seed of the pretraining or fine-tuning: mean of its values}."""
    values: dict[int, list[float]] = {}
    for trial in trials:
        seed = trial.pretraining_seed if pair == "pretraining" else trial.seed
        assert seed is not None
        values.setdefault(seed, []).append(trial.metrics[metric])
    return {seed: statistics.fmean(members) for seed, members in values.items()}


def fine_tuned_report(
    trials: Sequence[Trial],
    baseline: str,
    metrics: Sequence[str],
    tolerance: float,
    notes: Sequence[str],
    content: Mapping[str, Any],
) -> Report:
    """Return the report of all trials.

    Args:
        baseline: Name of a group.
        metrics: Metrics that are compared; the first one decides whether the criterion held.
        tolerance: The part of the baseline's value that a pair may lose.
        notes: Further notes of the report.
        content: Further content of report.json; `experiment` and `title` name the report.
    """
    comparisons = compare_trials(trials, baseline, metrics, tolerance)
    return Report(
        experiment=content["experiment"],
        title=content["title"],
        criterion=f"{metrics[0]} ≥ {100 * (1 - tolerance):g} % of {baseline}'s, pair by pair",
        verdicts=_verdicts(trials, [one for one in comparisons if one.metric == metrics[0]]),
        tables=[_scores(trials), *([_gaps(comparisons)] if comparisons else [])],
        notes=[*_notes(trials, comparisons), *notes],
        content={
            "baseline": baseline,
            "tolerance": tolerance,
            "comparisons": [
                asdict(comparison) | {"gap": comparison.gap and gap_content(comparison.gap)}
                for comparison in comparisons
            ],
            "trials": [asdict(trial) for trial in trials],
            **content,
        },
    )


def _verdicts(trials: Sequence[Trial], comparisons: Sequence[Comparison]) -> list[Verdict]:
    if not comparisons:
        return [
            Verdict(group, len(members), None, "nothing to compare with")
            for group, members in by_group(trials).items()
        ]
    verdicts = []
    for comparison in comparisons:
        name = f"{comparison.group}, {comparison.task}"
        gap = comparison.gap
        if gap is None:
            none_common = f"no seed in common with {comparison.baseline}"
            verdicts.append(Verdict(name, 0, None, none_common))
        else:
            numbers = f"{POINTS.signed(gap.mean)} points {POINTS.interval(gap)}"
            verdicts.append(Verdict(name, gap.n, comparison.held, numbers))
    return verdicts


def _scores(trials: Sequence[Trial]) -> Table:
    rows = []
    for task, groups in _by_task(trials):
        for group, members in groups.items():
            values = [
                f"{name} {seeds_text([100 * trial.metrics[name] for trial in members], 2)}"
                for name in members[0].metrics
            ]
            models = len({trial.model for trial in members})
            epochs = seeds_text([float(trial.best_epoch) for trial in members], 1)
            frozen = f"{100 * members[0].frozen_share:.1f} %"
            counts = f"{models} × {len(members) // models}"
            rows.append(
                (task, group, counts, ", ".join(values), epochs, frozen, str(members[0].items))
            )
    header = ("task", "variant", "models × seeds", "points", "best epoch", "frozen", "items")
    return text_table("Scores, in points", header, rows)


def _gaps(comparisons: Sequence[Comparison]) -> Table:
    rows = [
        GapRow(
            (
                comparison.task,
                comparison.metric,
                comparison.group,
                f"{comparison.gap.n if comparison.gap else 0} of {comparison.pair}",
            ),
            comparison.gap,
            comparison.metric,
        )
        for comparison in comparisons
    ]
    return gap_table(
        ("task", "metric", "variant", "pairs"),
        rows,
        (GAP, INTERVAL, EFFECT, T_P, T_HOLM),
        claims=True,
        title=f"Gaps to {comparisons[0].baseline}, in points; below 0 is worse",
        flush_left=True,
    )


def _notes(trials: Sequence[Trial], comparisons: Sequence[Comparison]) -> list[str]:
    accuracies = [trial.metrics["accuracy"] for trial in trials if "accuracy" in trial.metrics]
    notes = ["± is the standard deviation over fine-tunings"]
    if accuracies:
        p = statistics.fmean(accuracies)
        error = 100 * (p * (1 - p) / trials[0].items) ** 0.5
        notes.append(
            "over the choice of items the standard error of one model's accuracy, √(p (1 − p) / n),"
            f" is {number(error, 2)} points: a smaller gap says little about other items"
        )
    pairs = {comparison.pair for comparison in comparisons}
    if "fine-tuning" in pairs:
        notes.append(
            "pairs of fine-tuning seeds of one pretrained model: the interval is of this "
            "pretraining, not of the method; for that, pretrain several seeds of both variants"
        )
    if any(comparison.gap and comparison.gap.n < FEWEST_SEEDS for comparison in comparisons):
        notes.append(f"below {FEWEST_SEEDS} pairs no significance is claimed, whatever p is")
    if len(comparisons) > 1:
        notes.append(f"Holm's correction is over all {len(comparisons)} comparisons")
    return notes
