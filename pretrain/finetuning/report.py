"""Fine-tuned models beside a baseline: one report for classification and for translation.

Scores are shown in points, 100 the best, and kept as parts of 1. What a pair is: two pretrainings of the same
seed, each the mean over its fine-tunings, where two seeds or more were pretrained of both; else two
fine-tunings of the same seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pretrain.errors import UserError
from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, interval, number, signed
from pretrain.study.gaps import FEWEST_SEEDS, POINTS, PairedGap, adjust, gap_content, paired_gap
from pretrain.study.report import Report, Verdict, seeds_text, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pair = Literal["pretraining", "fine-tuning"]


@dataclass(frozen=True)
class Trial:
    """One fine-tuning of one model on one task.

    Attributes:
        pretraining_seed: None where it is not known.
        score: 1 is the best.
        metrics: of which the score is made, or the first of which it is.
        standard_error: of the score over the choice of items.
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


@dataclass(frozen=True)
class Comparison:
    """A group beside the baseline on one task.

    Attributes:
        held: in how many pairs the criterion held; None where a score of the baseline is not above 0.
    """

    task: str
    group: str
    pair: Pair
    gap: PairedGap | None
    held: int | None


def find_baseline(wanted: str | None, groups: Sequence[str], models: Sequence[str]) -> str:
    """The group that the others are compared with: by its name, or that of one of its models.

    Args:
        wanted: None: the group of the first model.

    Raises:
        UserError: there is none of that name.
    """
    if wanted is None or wanted in groups:
        return wanted or groups[0]
    if wanted in models:
        return groups[list(models).index(wanted)]
    known = ", ".join(dict.fromkeys(groups))
    raise UserError(f"--baseline {wanted}: no model and no group has that name; there are {known}")


def compare_trials(trials: Sequence[Trial], baseline: str, tolerance: float) -> list[Comparison]:
    """Every group beside the baseline on every task, with Holm's correction over all of these.

    Args:
        tolerance: the part of the baseline's score that a pair may lose.
    """
    found = []
    for task in dict.fromkeys(trial.task for trial in trials):
        groups = _by_group([trial for trial in trials if trial.task == task])
        for group, own in groups.items():
            if group != baseline and baseline in groups:
                found.append(_compare(task, group, own, groups[baseline], baseline, tolerance))
    gaps = adjust([comparison.gap for comparison in found])
    return [
        Comparison(one.task, one.group, one.pair, gap, one.held) for one, gap in zip(found, gaps, strict=True)
    ]


def _compare(
    task: str, group: str, own: Sequence[Trial], base: Sequence[Trial], baseline: str, tolerance: float
) -> Comparison:
    pair, scores, others = _pairs(own, base)
    gap = paired_gap(baseline, scores, others, POINTS)
    seeds = gap.seeds if gap else ()
    held = sum(scores[seed] >= (1 - tolerance) * others[seed] for seed in seeds)
    testable = all(others[seed] > 0 for seed in seeds)
    return Comparison(task, group, pair, gap, held if testable else None)


def _pairs(own: Sequence[Trial], base: Sequence[Trial]) -> tuple[Pair, dict[int, float], dict[int, float]]:
    """What a pair is, and {its seed: score} of both."""
    common = {t.pretraining_seed for t in own} & {t.pretraining_seed for t in base} - {None}
    if len(common) >= 2:
        return (
            "pretraining",
            _means({(t.pretraining_seed, t.seed): t.score for t in own if t.pretraining_seed in common}),
            _means({(t.pretraining_seed, t.seed): t.score for t in base if t.pretraining_seed in common}),
        )
    if common:  # only these are of the same samples in the same order
        own = [t for t in own if t.pretraining_seed in common]
        base = [t for t in base if t.pretraining_seed in common]
    scores, others = (
        _means({(trial.seed, index): trial.score for index, trial in enumerate(trials)})
        for trials in (own, base)
    )
    return "fine-tuning", scores, others


def _means(scores: Mapping[tuple[Any, int], float]) -> dict[int, float]:
    by_first: dict[int, list[float]] = {}
    for (first, _), value in scores.items():
        by_first.setdefault(first, []).append(value)
    return {first: statistics.fmean(values) for first, values in by_first.items()}


def _by_group(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.group, []).append(trial)
    return found


def fine_tuned_report(
    experiment: str,
    title: str,
    trials: Sequence[Trial],
    baseline: str,
    tolerance: float,
    notes: Sequence[str],
    content: Mapping[str, Any],
) -> Report:
    """The report of all trials.

    Args:
        tolerance: as in `compare_trials`.
        notes: what is to be said of this kind of task.
        content: what else report.json has.
    """
    comparisons = compare_trials(trials, baseline, tolerance)
    return Report(
        experiment=experiment,
        title=title,
        criterion=f"score ≥ {100 * (1 - tolerance):g} % of {baseline}'s, pair by pair",
        verdicts=_verdicts(trials, comparisons, baseline),
        tables=[_scores(trials), *([_gaps(comparisons, baseline)] if comparisons else [])],
        notes=[*_notes(comparisons, baseline), *notes],
        content={
            "baseline": baseline,
            "tolerance": tolerance,
            "comparisons": [_comparison_json(comparison) for comparison in comparisons],
            "trials": [asdict(trial) for trial in trials],
            **content,
        },
        figures={"scores": partial(_figure, trials)},
    )


def _verdicts(trials: Sequence[Trial], comparisons: Sequence[Comparison], baseline: str) -> list[Verdict]:
    if not comparisons:
        counts = {group: len(found) for group, found in _by_group(trials).items()}
        return [Verdict(group, n, None, "nothing to compare with") for group, n in counts.items()]
    found = []
    for one in comparisons:
        name = f"{one.group}, {one.task}"
        if one.gap is None:
            found.append(Verdict(name, 0, None, f"no seed in common with {baseline}"))
            continue
        told = f"{signed(100 * one.gap.mean, 2)} points {_interval(one.gap)}"
        found.append(Verdict(name, one.gap.n, one.held, told))
    return found


def _scores(trials: Sequence[Trial]) -> Table:
    rows = []
    for task in dict.fromkeys(trial.task for trial in trials):
        for group, found in _by_group([trial for trial in trials if trial.task == task]).items():
            metrics = ", ".join(
                f"{name} {_points([trial.metrics[name] for trial in found])}" for name in found[0].metrics
            )
            error = statistics.fmean(trial.standard_error for trial in found)
            pretrained = len({trial.model for trial in found})
            score = _points([trial.score for trial in found])
            of = f"{pretrained} × {len(found) // pretrained}"
            rows.append((task, group, of, score, metrics, number(100 * error, 2), f"{found[0].items:,}"))
    header = ("task", "variant", "models × seeds", "score", "metrics", "standard error of the task", "items")
    return text_table("Scores, in points", header, rows)


def _gaps(comparisons: Sequence[Comparison], baseline: str) -> Table:
    rows = []
    for one in comparisons:
        gap = one.gap
        if gap is None:
            rows.append((one.task, one.group, f"0 of {one.pair}", *[NOTHING] * 5))
            continue
        rows.append(
            (
                one.task,
                one.group,
                f"{gap.n} of {one.pair}",
                signed(100 * gap.mean, 2),
                _interval(gap),
                number(gap.t_p, 4),
                number(gap.t_p_holm, 4),
                "yes" if gap.significance_claimed else "no",
            )
        )
    header = ("task", "variant", "pairs", "gap", "95 % interval", "p (t)", "p (Holm)", "significance claimed")
    return text_table(f"Beside {baseline}, in points; below 0 is worse", header, rows)


def _points(values: Sequence[float]) -> str:
    return seeds_text([100 * value for value in values], 2)


def _interval(gap: PairedGap) -> str:
    return NOTHING if gap.low is None or gap.high is None else interval(100 * gap.low, 100 * gap.high, 2)


def _notes(comparisons: Sequence[Comparison], baseline: str) -> list[str]:
    notes = [
        "± is the standard deviation over fine-tunings; the standard error of the task is of one model over "
        "the choice of its items: a gap below about twice that says little about other items",
    ]
    if any(one.pair == "fine-tuning" for one in comparisons):
        notes.append(
            "pairs of fine-tuning seeds of one pretrained model each: the interval is of these two models, "
            "not of their methods; for that, pretrain several seeds of both and give all of them"
        )
    if any(one.gap is not None and one.gap.n < FEWEST_SEEDS for one in comparisons):
        notes.append(f"below {FEWEST_SEEDS} pairs no significance is claimed, whatever p is")
    if len(comparisons) > 1:
        notes.append(f"p (Holm) is adjusted over all {len(comparisons)} comparisons with {baseline}")
    return notes


def _comparison_json(one: Comparison) -> dict[str, Any]:
    gap = None
    if one.gap is not None:
        gap = gap_content(one.gap) | {"significance_claimed": one.gap.significance_claimed}
    return {"task": one.task, "group": one.group, "pair": one.pair, "held": one.held, "gap": gap}


def _figure(trials: Sequence[Trial]) -> Figure:
    """Every trial a point, by task and group."""
    from pretrain.reporting.plots import group_style, label, legend_below, new_figure

    tasks, groups = (list(dict.fromkeys(getattr(t, key) for t in trials)) for key in ("task", "group"))
    figure, (plot,) = new_figure(1, 1, height=3.6)
    for group in groups:
        colour, marker = group_style(groups, group)
        own = [trial for trial in trials if trial.group == group]
        shift = 0.6 * ((groups.index(group) + 0.5) / len(groups) - 0.5)
        places = [tasks.index(trial.task) + shift for trial in own]
        scores = [100 * trial.score for trial in own]
        plot.plot(places, scores, marker, color=colour, markersize=5, fillstyle="none", label=group)
    plot.set_xticks(range(len(tasks)), tasks)
    label(plot, "Every fine-tuning", "", "score, points")
    legend_below(figure, plot)
    return figure
