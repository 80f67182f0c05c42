"""The tables of the report of tasks."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.evaluation.tasks.statistics import Contrast, ItemTest, TaskComparison
from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, interval, mean_sd, number, share, signed
from pretrain.study.gaps import CONFIDENCE
from pretrain.study.tables import p_value, verdict

DIGITS = 4


def results_table(comparison: TaskComparison) -> Table:
    """Every score of every variant."""
    rows = [
        (
            one.task,
            f"{one.metric} {'↑' if one.higher_is_better else '↓'}",
            one.variant,
            str(one.score.n),
            mean_sd(one.score, DIGITS),
            number(one.stderr, DIGITS),
            f"{one.items:,}",
        )
        for one in comparison.results
    ]
    header = ("task", "metric", "variant", "n", "mean ± sd", "standard error", "items")
    return Table(header, rows, text_columns=(0, 1, 2))


def gap_table(contrasts: Sequence[Contrast]) -> Table:
    """The tested metric of each task: gap, interval, effect size, tests, and what may be said."""
    rows = []
    for one in contrasts:
        if not one.tested:
            continue
        gap, name = one.gap, (one.task, one.metric, one.variant)
        if gap is None:
            rows.append((*name, "0", *[NOTHING] * 7, verdict(None)))
            continue
        rows.append(
            (
                *name,
                str(gap.n),
                signed(gap.mean, DIGITS),
                interval(gap.low, gap.high, DIGITS),
                signed(gap.cohens_dz, 2),
                p_value(gap.t_p, gap.n),
                p_value(gap.t_p_holm, gap.n),
                p_value(gap.wilcoxon_p, gap.n),
                p_value(gap.wilcoxon_p_holm, gap.n),
                verdict(gap, one.metric),
            )
        )
    header = (
        *("task", "metric", "variant", "pairs", "gap", f"{share(CONFIDENCE)} interval", "d_z"),
        *("t-test p", "by Holm", "Wilcoxon p", "by Holm", "what may be said"),
    )
    return Table(header, rows, text_columns=(0, 1, 2, len(header) - 1))


def short_gap_table(contrasts: Sequence[Contrast]) -> Table:
    """The same for the terminal: gap, interval and one p value."""
    rows = [
        (
            one.task,
            one.metric,
            one.variant,
            str(one.gap.n if one.gap else 0),
            *_gap_cells(one),
            p_value(one.gap.t_p_holm, one.gap.n) if one.gap else NOTHING,
        )
        for one in contrasts
        if one.tested
    ]
    header = ("task", "metric", "variant", "pairs", "gap", f"{share(CONFIDENCE)} interval", "p, Holm")
    return Table(header, rows, text_columns=(0, 1, 2))


def other_gap_table(contrasts: Sequence[Contrast]) -> Table:
    """Gap and interval of the metrics that are not tested."""
    rows = [
        (one.task, one.metric, one.variant, str(one.gap.n if one.gap else 0), *_gap_cells(one))
        for one in contrasts
    ]
    return Table(
        ("task", "metric", "variant", "pairs", "gap", f"{share(CONFIDENCE)} interval"), rows, (0, 1, 2)
    )


def item_table(tests: Sequence[ItemTest]) -> Table:
    """McNemar's test of every pair of models."""
    rows = [
        (
            one.task,
            one.metric,
            one.model,
            one.base,
            f"{one.items:,}",
            f"{one.only_model:,}",
            f"{one.only_base:,}",
            p_value(one.p),
            p_value(one.p_holm),
        )
        for one in tests
    ]
    header = (
        *("task", "metric", "model", "baseline's", "items"),
        *("only the model right", "only the baseline's", "McNemar p", "by Holm"),
    )
    return Table(header, rows, text_columns=(0, 1, 2, 3))


def _gap_cells(one: Contrast) -> tuple[str, str]:
    gap = one.gap
    if gap is None:
        return NOTHING, NOTHING
    return signed(gap.mean, DIGITS), interval(gap.low, gap.high, DIGITS)
