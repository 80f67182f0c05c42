"""report.md: the comparison for people, the formulas behind its numbers, the command that remakes it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pretrain.compare.comparison import Comparison
from pretrain.compare.console import headlines
from pretrain.compare.definitions import definitions
from pretrain.compare.provenance import provenance
from pretrain.compare.tables import (
    convergence_table,
    cost_table,
    gap_table,
    runs_table,
    source_gap_table,
    stability_table,
    validation_table,
)
from pretrain.compare.trend_text import trend_sentences, trend_table
from pretrain.reporting.tables import markdown
from pretrain.study.tables import gap_sentence


def report_markdown(comparison: Comparison, plots: Sequence[str], command: Sequence[Sequence[str]]) -> str:
    """The whole report.

    Args:
        plots: file names of those there are, beside the report: loss, gap, trend, memory, throughput.
        command: the command that made it, cut where a line may break.
    """
    shown = {name.removesuffix(".png"): f"![{name.removesuffix('.png')}]({name})" for name in plots}
    gaps = sum(not variant.is_baseline for variant in comparison.variants)
    lines = ["# Comparison of runs", "", *_paragraphs(headlines(comparison))]
    lines += [*_summary(comparison), *_quality(comparison, shown), *_trends(comparison, shown)]
    lines += [*_convergence(comparison, shown), *_cost(comparison, shown)]
    lines += ["## Runs", "", *markdown(runs_table(comparison)), ""]
    how = definitions(gaps, len(comparison.trends))
    lines += ["## How the numbers are made", "", *(f"* {text}" for text in how), ""]
    lines += ["## Made by", "", "```", " \\\n    ".join(map(shlex.join, command)), "```", ""]
    lines += ["of", "", *(f"* {text}" for text in provenance(comparison.runs)), ""]
    return "\n".join(lines)


def _summary(comparison: Comparison) -> list[str]:
    gaps = [
        gap_sentence(variant.name, variant.gap) for variant in comparison.variants if not variant.is_baseline
    ]
    said = (*gaps, *trend_sentences(comparison.trends), *comparison.notes)
    return ["## In short", "", *(f"* {text}" for text in said), ""]


def _quality(comparison: Comparison, shown: dict[str, str]) -> list[str]:
    lines = ["## Validation", "", *markdown(validation_table(comparison)), ""]
    if any(not variant.is_baseline for variant in comparison.variants):
        lines += ["The gap to the baseline, paired by seed; positive is worse:", ""]
        lines += [*markdown(gap_table(comparison)), "", *_plot(shown, "gap")]
        if len(comparison.sources) > 1:
            lines += ["The gap by source, in nats per token (not tested):", ""]
            lines += [*markdown(source_gap_table(comparison)), ""]
    return lines


def _trends(comparison: Comparison, shown: dict[str, str]) -> list[str]:
    if not comparison.trends:
        return []
    return [
        f"## How the gap changes with {comparison.trends[0].subject}",
        "",
        *_plot(shown, "trend"),
        "In nats per token:",
        "",
        *markdown(trend_table(comparison.trends)),
        "",
    ]


def _convergence(comparison: Comparison, shown: dict[str, str]) -> list[str]:
    return [
        "## Convergence",
        "",
        *_plot(shown, "loss"),
        "Steps and tokens to the training loss that the baseline's run of the same seed had at 25, 50, 75 "
        "and 100 % of its tokens; in parentheses, tokens against the baseline's:",
        "",
        *markdown(convergence_table(comparison)),
        "",
        *markdown(stability_table(comparison)),
        "",
    ]


def _cost(comparison: Comparison, shown: dict[str, str]) -> list[str]:
    lines = ["## Cost", "", *_plot(shown, "throughput"), *_plot(shown, "memory")]
    for stratum in dict.fromkeys(variant.stratum for variant in comparison.variants):
        lines += [f"### {stratum}", ""] if stratum else []
        lines += [*markdown(cost_table(comparison, stratum)), ""]
    return lines


def _plot(shown: dict[str, str], name: str) -> list[str]:
    return [shown[name], ""] if name in shown else []


def _paragraphs(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in (text, "")]
