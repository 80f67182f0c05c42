"""Report of fine-tuned models beside a baseline.

Scores are shown in points, 100 the best, and kept as parts of 1. A pair is two pretrainings of the
same seed, each the mean over its fine-tunings, where two seeds or more were pretrained of both;
else two fine-tunings of the same seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Literal

from matplotlib.figure import Figure

from laboratory.reporting.plots import group_style, label, legend_below, new_figure
from laboratory.study.gaps import FEWEST_SEEDS, POINTS, PairedGap, adjust, gap_content, paired_gap
from laboratory.study.report import Report, Verdict, seeds_text, text_table
from laboratory.study.seeds import by_group
from laboratory.study.tables import (
    EFFECT,
    GAP,
    INTERVAL,
    T_HOLM,
    T_P,
    WILCOXON_HOLM,
    GapRow,
    gap_table,
)
from pretrain.reporting.tables import Table
from pretrain.reporting.text import number

_GAP_COLUMNS = (
    GAP,
    INTERVAL,
    EFFECT,
    replace(T_P, title="p (t)"),
    replace(T_HOLM, title="p (t, Holm)"),
    replace(WILCOXON_HOLM, title="p (Wilcoxon, Holm)"),
)


@dataclass(frozen=True)
class Trial:
    """Scores of one fine-tuning of one model on one task.

    Attributes:
        task: Name of the task.
        group: Group of the model.
        model: Name of the model.
        pretraining_seed: None where it is not known.
        seed: Seed of the fine-tuning.
        score: 1 is the best.
        metrics: Metrics that the score is made of, or whose first it is.
        standard_error: Standard error of the score over the choice of items.
        items: Number of items.
    """

    task: str
    group: str
    model: str
    pretraining_seed: int | None
    seed: int
    score: float
    metrics: Mapping[str, float]
    standard_error: float
    items: int

    MEASURED: ClassVar[tuple[str, ...]] = ("score", "metrics", "standard_error", "items")
    """Attributes that are the result of the fine-tuning."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of a group with another on one task.

    Attributes:
        task: Name of the task.
        group: Name of the group.
        control: The other group, which is the baseline.
        pair: Kind of pairs that the gap is over.
        gap: None without a seed in common.
        held: Number of pairs in which the criterion held; None if a score of the control is not
            above 0.
    """

    task: str
    group: str
    control: str
    pair: Literal["pretraining", "fine-tuning"]
    gap: PairedGap | None
    held: int | None


def compare_trials(trials: Sequence[Trial], baseline: str, tolerance: float) -> list[Comparison]:
    """Compare every group with the baseline on every task, corrected over all comparisons.

    Args:
        trials: All fine-tunings.
        baseline: Name of a group.
        tolerance: The part of the baseline's score that a pair may lose.
    """
    comparisons = [
        _compare(members, groups[baseline], tolerance)
        for groups in _by_task(trials).values()
        for group, members in groups.items()
        if group != baseline and baseline in groups
    ]
    gaps = adjust([comparison.gap for comparison in comparisons])
    return [replace(comparison, gap=gap) for comparison, gap in zip(comparisons, gaps, strict=True)]


def _by_task(trials: Sequence[Trial]) -> dict[str, dict[str, list[Trial]]]:
    """Return {task: {group: its trials}}, all in the order of the trials."""
    tasks = dict.fromkeys(trial.task for trial in trials)
    return {task: by_group(trial for trial in trials if trial.task == task) for task in tasks}


def _compare(group_trials: Sequence[Trial], base: Sequence[Trial], tolerance: float) -> Comparison:
    common = {t.pretraining_seed for t in group_trials} & {t.pretraining_seed for t in base} - {
        None
    }
    if common:  # only these are of the same samples in the same order
        group_trials, base = (
            [t for t in trials if t.pretraining_seed in common] for trials in (group_trials, base)
        )
    # With one pretraining seed the spread can only be over fine-tunings.
    several = len(common) >= 2
    scores, base_scores = (
        _means(trials, "pretraining_seed" if several else "seed") for trials in (group_trials, base)
    )
    gap = paired_gap(base[0].group, scores, base_scores, POINTS)
    seeds = gap.seeds if gap else ()
    testable = all(base_scores[seed] > 0 for seed in seeds)
    held = sum(scores[seed] >= (1 - tolerance) * base_scores[seed] for seed in seeds)
    pair: Literal["pretraining", "fine-tuning"] = "pretraining" if several else "fine-tuning"
    return Comparison(
        task=group_trials[0].task,
        group=group_trials[0].group,
        control=base[0].group,
        pair=pair,
        gap=gap,
        held=held if testable else None,
    )


def _means(trials: Sequence[Trial], which: str) -> dict[int, float]:
    """Return {seed: mean of its scores}; `which` names the attribute with the seed."""
    seed_of = attrgetter(which)
    seeds = dict.fromkeys(map(seed_of, trials))
    return {seed: statistics.fmean(t.score for t in trials if seed_of(t) == seed) for seed in seeds}


def fine_tuned_report(
    trials: Sequence[Trial],
    baseline: str,
    tolerance: float,
    notes: Sequence[str],
    content: Mapping[str, Any],
) -> Report:
    """Return the report of all trials.

    Args:
        trials: All fine-tunings.
        baseline: Name of a group.
        tolerance: The part of the baseline's score that a pair may lose.
        notes: Further notes of the report.
        content: Further content of report.json.
    """
    comparisons = compare_trials(trials, baseline, tolerance)
    return Report(
        experiment="E3",
        title="Fine-tuning on GLUE",
        criterion=f"score ≥ {100 * (1 - tolerance):g} % of {baseline}'s, pair by pair",
        verdicts=_verdicts(trials, comparisons, baseline),
        tables=[_scores(trials), *([_gaps(comparisons)] if comparisons else [])],
        notes=[*_notes(trials, comparisons), *notes],
        content={
            "baseline": baseline,
            "tolerance": tolerance,
            "comparisons": [
                asdict(comparison)
                | {
                    "gap": comparison.gap
                    and gap_content(comparison.gap)
                    | {"significance_claimed": comparison.gap.significance_claimed}
                }
                for comparison in comparisons
            ],
            "trials": [asdict(trial) for trial in trials],
            **content,
        },
        figures={"scores": partial(_figure, trials)},
    )


def _verdicts(
    trials: Sequence[Trial], comparisons: Sequence[Comparison], baseline: str
) -> list[Verdict]:
    if not comparisons:
        return [
            Verdict(group, len(members), None, "nothing to compare with")
            for group, members in by_group(trials).items()
        ]
    verdicts = []
    for comparison in comparisons:
        name = f"{comparison.group}, {comparison.task}"
        if comparison.gap is None:
            verdicts.append(Verdict(name, 0, None, f"no seed in common with {baseline}"))
        else:
            numbers = (
                f"{POINTS.signed(comparison.gap.mean)} points {POINTS.interval(comparison.gap)}"
            )
            verdicts.append(Verdict(name, comparison.gap.n, comparison.held, numbers))
    return verdicts


def _scores(trials: Sequence[Trial]) -> Table:
    rows = []
    for task, groups in _by_task(trials).items():
        for group, members in groups.items():
            metrics = ", ".join(
                f"{name} {_points([trial.metrics[name] for trial in members])}"
                for name in members[0].metrics
            )
            error = statistics.fmean(trial.standard_error for trial in members)
            models = len({trial.model for trial in members})
            counts = f"{models} × {len(members) // models}"
            score = _points([trial.score for trial in members])
            rows.append(
                (
                    task,
                    group,
                    counts,
                    score,
                    metrics,
                    number(100 * error, 2),
                    f"{members[0].items:,}",
                )
            )
    header = (
        "task",
        "variant",
        "models × seeds",
        "score",
        "metrics",
        "standard error of the task",
        "items",
    )
    return text_table("Scores, in points", header, rows)


def _gaps(comparisons: Sequence[Comparison]) -> Table:
    rows = [
        GapRow(
            (
                comparison.task,
                comparison.group,
                comparison.control,
                f"{comparison.gap.n if comparison.gap else 0} of {comparison.pair}",
            ),
            comparison.gap,
            "score",
        )
        for comparison in comparisons
    ]
    names, title = ("task", "variant", "beside", "pairs"), "Gaps, in points; below 0 is worse"
    return gap_table(names, rows, _GAP_COLUMNS, claims=True, title=title, flush_left=True)


def _points(values: Sequence[float]) -> str:
    return seeds_text([100 * value for value in values], 2)


def _notes(trials: Sequence[Trial], comparisons: Sequence[Comparison]) -> list[str]:
    notes = [
        "± is the standard deviation over fine-tunings; the standard error of the task is of one "
        "model over the choice of its items: a gap below about twice that says little about other "
        "items"
    ]
    several = len({trial.model for trial in trials}) > 1
    if several and any(comparison.pair == "fine-tuning" for comparison in comparisons):
        notes.append(
            "pairs of fine-tuning seeds of one pretrained model each: the interval is of these "
            "two models, not of their methods; for that, pretrain several seeds of both and give "
            "all of them"
        )
    if any(
        comparison.gap is not None and comparison.gap.n < FEWEST_SEEDS for comparison in comparisons
    ):
        notes.append(f"below {FEWEST_SEEDS} pairs no significance is claimed, whatever p is")
    if len(comparisons) > 1:
        notes.append(f"p (Holm) is adjusted over all {len(comparisons)} comparisons")
    return notes


def _figure(trials: Sequence[Trial]) -> Figure:
    """Draw every trial as a point, by task and group."""
    tasks = list(_by_task(trials))
    groups = by_group(trials)
    figure, (plot,) = new_figure(1, 1, height=3.6)
    for number_of_group, (group, members) in enumerate(groups.items()):
        colour, marker = group_style(list(groups), group)
        shift = 0.6 * ((number_of_group + 0.5) / len(groups) - 0.5)
        places = [tasks.index(trial.task) + shift for trial in members]
        scores = [100 * trial.score for trial in members]
        plot.plot(places, scores, marker, color=colour, markersize=5, fillstyle="none", label=group)
    plot.set_xticks(range(len(tasks)), tasks)
    label(plot, "Every fine-tuning", "", "score, points")
    legend_below(figure, plot)
    return figure
