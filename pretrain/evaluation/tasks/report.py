"""The report of `evaluate tasks`: report.md for people, report.json for programs, tables on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pretrain.compare.comparability import EXPECTED_TO_DIFFER
from pretrain.evaluation.tasks.harness import BOOTSTRAP, Measured
from pretrain.evaluation.tasks.models import Subject
from pretrain.evaluation.tasks.statistics import Contrast, Scores, TaskComparison
from pretrain.evaluation.tasks.tables import (
    DIGITS,
    gap_table,
    item_table,
    other_gap_table,
    results_table,
    short_gap_table,
)
from pretrain.reporting.content import strict_json
from pretrain.reporting.tables import Table, markdown, rich_table
from pretrain.reporting.text import NOTHING, number, setting_text, share, signed
from pretrain.runs.directory import write_json, write_text_atomically
from pretrain.study.gaps import CONFIDENCE, FEWEST_SEEDS, gap_content
from pretrain.study.seeds import Groups, settings_of
from pretrain.study.tables import verdict


@dataclass(frozen=True)
class TaskReport:
    """A comparison on tasks, and what it was made of. `command` is cut where a line may break."""

    comparison: TaskComparison
    groups: Groups[Subject]
    measured: Sequence[Measured]
    scores: Scores
    limit: int | None
    versions: Mapping[str, str]
    command: Sequence[Sequence[str]]


def write_task_report(report: TaskReport, out: Path) -> Path:
    """Write both forms into `out` (made if missing); returns the path of report.md."""
    write_json(out / "report.json", strict_json(_content(report)))
    write_text_atomically(out / "report.md", task_report_markdown(report))
    return out / "report.md"


def print_task_report(report: TaskReport, console: Console) -> None:
    """The scores, the tested gaps, and what a reader must know."""
    console.print(rich_table(results_table(report.comparison)))
    if report.comparison.contrasts:
        console.print(rich_table(short_gap_table(report.comparison.contrasts)))
    for note in notes(report):
        console.print(Text(f"* {note}"))


def task_report_markdown(report: TaskReport) -> str:
    """The whole report."""
    comparison = report.comparison
    harness = report.versions["lm-eval"]
    lines = ["# Tasks", "", f"Baseline: {comparison.baseline}. lm-evaluation-harness {harness}.", ""]
    lines += ["## In short", ""]
    lines += [f"* {_sentence(one)}" for one in comparison.contrasts if one.tested]
    lines += [*(f"* {note}" for note in notes(report)), ""]
    lines += ["## Scores", "", *markdown(results_table(comparison)), ""]
    if comparison.contrasts:
        lines += ["## Gaps to the baseline, paired by seed", ""]
        lines += [*markdown(gap_table(comparison.contrasts)), ""]
    if others := [one for one in comparison.contrasts if not one.tested]:
        lines += ["## Gaps by the other metrics (not tested)", "", *markdown(other_gap_table(others)), ""]
    if comparison.item_tests:
        lines += ["## Item by item, one model against one", ""]
        lines += [*markdown(item_table(comparison.item_tests)), ""]
    lines += ["## Tasks and models", "", *markdown(_task_table(report)), "", *markdown(_model_table(report))]
    lines += ["", "## How the numbers are made", "", *(f"* {text}" for text in _definitions(report)), ""]
    lines += ["## Made by", "", "```", " \\\n    ".join(map(shlex.join, report.command)), "```", ""]
    return "\n".join(lines)


def notes(report: TaskReport) -> list[str]:
    """What a reader must know before any number."""
    found = []
    if report.limit is not None:
        found.append(
            f"Only the first {report.limit} items of each task were used (--limit): this is to try it out, "
            "and no result."
        )
    few = sorted({one.gap.n if one.gap else 0 for one in report.comparison.contrasts})
    if few and few[0] < FEWEST_SEEDS:
        sizes = " and ".join(f"n = {n}" for n in few if n < FEWEST_SEEDS)
        found.append(
            f"Fewer than {FEWEST_SEEDS} pairs of seeds ({sizes}): no statistical significance is claimed of "
            "variants there."
        )
    cut = {name: max(s[name].cut for s in report.scores.values()) for name in _names(report)}
    if any(cut.values()):
        listed = ", ".join(f"{number(count, 0)} of {name}" for name, count in cut.items() if count)
        found.append(
            f"Requests longer than the model's context lose their beginning, here up to {listed} a model."
        )
    if differing := _differing_settings(report.groups):
        found.append(f"The runs also differ in {', '.join(differing)}.")
    steps = sorted({str(one.step or "unknown") for group in report.groups.groups for one in group.runs})
    if len(steps) > 1:
        found.append(
            f"The models are of different steps ({', '.join(steps)}): a gap is not of the variant alone."
        )
    return found


def _differing_settings(groups: Groups[Subject]) -> list[str]:
    """Keys in which the runs' configurations differ, but for what `compare` expects."""
    runs = [one for group in groups.groups for one in group.runs if one.is_run]
    settings = [settings_of(run) for run in runs]
    keys = {key for values in settings for key in values if not key.startswith(EXPECTED_TO_DIFFER)}
    return [key for key in sorted(keys) if len({setting_text(one.get(key)) for one in settings}) > 1]


def _sentence(one: Contrast) -> str:
    gap = one.gap
    if gap is None:
        return f"{one.task}: {one.variant}: {verdict(None)}."
    size = f"{one.metric} {signed(gap.mean, DIGITS)}"
    if gap.low is not None:
        size += f" ({share(CONFIDENCE)} interval {signed(gap.low, DIGITS)} to {signed(gap.high, DIGITS)})"
    return f"{one.task}: {one.variant}: {size} against {gap.baseline}; {verdict(gap, one.metric)}."


def _task_table(report: TaskReport) -> Table:
    rows = [
        (one.name, part.name if one.group else NOTHING, part.version, str(part.shots), part.asked[:12])
        for one in report.measured
        for part in one.tasks
    ]
    return Table(("task", "part", "version", "shots", "requests, SHA-256"), rows, (0, 1, 4))


def _model_table(report: TaskReport) -> Table:
    rows = [
        (group.name, one.name, str(one.seed), NOTHING if one.step is None else f"{one.step:,}", str(one.path))
        for group in report.groups.groups
        for one in group.runs
    ]
    return Table(("variant", "model", "seed", "step", "directory"), rows, (0, 1, 4))


def _definitions(report: TaskReport) -> list[str]:
    tests = sum(one.tested and one.gap is not None for one in report.comparison.contrasts)
    return [
        "Scores are lm-evaluation-harness's own; ↑ means that higher is better, ↓ that lower is. A group of "
        "tasks has the number that the harness makes of its parts.",
        "mean ± sd: over the variant's runs (seeds). Standard error: the harness's own, over items, mean of "
        f"the runs'; where the metric is no mean, from {BOOTSTRAP:,} bootstrap resamples.",
        "gap: mean over pairs of seeds of the variant's score minus the baseline's. Interval, paired t-test, "
        f"Wilcoxon's test and d_z as in `compare`; Holm's correction is over the {tests} tested gaps. Of "
        "each task one metric is tested: acc, or else the first that is 0 or 1 for every item, or else the "
        "first.",
        "McNemar: two models on the same items, exact and two-sided, of the items that only one has right; "
        f"Holm's correction over the {len(report.comparison.item_tests)} tests of this kind. It speaks of "
        "these two models: what another seed would do is not in it. The items of a group are those of all "
        "its parts.",
    ]


def _names(report: TaskReport) -> list[str]:
    return [one.name for one in report.measured]


def _content(report: TaskReport) -> dict[str, Any]:
    models = [
        {
            "variant": group.name,
            "name": one.name,
            "seed": one.seed,
            "step": one.step,
            "path": str(one.path),
            "tasks": {name: _model_scores(report, one, name) for name in _names(report)},
        }
        for group in report.groups.groups
        for one in group.runs
    ]
    tasks = {
        one.name: [
            {"task": part.name, "version": part.version, "shots": part.shots, "asked": part.asked}
            for part in one.tasks
        ]
        for one in report.measured
    }
    return {
        "experiment": "tasks",
        "versions": dict(report.versions),
        "limit": report.limit,
        "notes": notes(report),
        "tasks": tasks,
        "models": models,
        **asdict(report.comparison),
        "contrasts": [
            asdict(replace(one, gap=None)) | {"gap": gap_content(one.gap) if one.gap else None}
            for one in report.comparison.contrasts
        ],
    }


def _model_scores(report: TaskReport, subject: Subject, name: str) -> dict[str, Any]:
    """Without the items, which are below OUT/results."""
    found = report.scores[subject.path][name]
    scores = {
        metric: {key: value for key, value in asdict(score).items() if key != "items"}
        for metric, score in found.scores.items()
    }
    return {"items": found.items, "cut": found.cut, "scores": scores}
