"""Report of `evaluate tasks`: scores, gaps over pairs of seeds, McNemar's tests, their making."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from laboratory.compare.comparability import EXPECTED_TO_DIFFER
from laboratory.evaluation.tasks.harness import BOOTSTRAP, Measured
from laboratory.evaluation.tasks.scores import TaskScores
from laboratory.evaluation.tasks.statistics import (
    Contrast,
    ItemTest,
    Result,
    Scores,
    TaskComparison,
)
from laboratory.finetuning.models import Pretrained
from laboratory.study.gaps import FEWEST_SEEDS, gap_content
from laboratory.study.report import Block, Document
from laboratory.study.seeds import Groups
from laboratory.study.tables import (
    EFFECT,
    GAP,
    INTERVAL,
    PAIRS,
    T_HOLM,
    TESTS,
    GapColumn,
    GapRow,
    gap_sentence,
    gap_table,
    p_value,
)
from pretrain.config.keys import by_section
from pretrain.config.sources import read_yaml
from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, mean_sd, number, setting_text
from pretrain.runs.directory import RunDirectory

DIGITS = 4


@dataclass(frozen=True)
class TaskReport:
    """Comparison on tasks with its inputs.

    Attributes:
        groups: Models by variant.
        scores: Scores of all models on all tasks.
        limit: The first items of each task, at most; None: all.
        versions: Versions of the packages.
        command: Command that made the report, cut where a line may break.
    """

    comparison: TaskComparison
    groups: Groups[Pretrained]
    measured: Sequence[Measured]
    scores: Scores
    limit: int | None
    versions: Mapping[str, str]
    command: Sequence[Sequence[str]]

    def document(self) -> Document:
        """Return all forms of the report."""
        comparison = self.comparison
        remarks = notes(self)
        tested, untested = (
            [contrast for contrast in comparison.contrasts if contrast.tested is t]
            for t in (True, False)
        )
        in_short = [
            gap_sentence(f"{contrast.task}: {contrast.variant}", contrast.gap, contrast.metric)
            for contrast in tested
        ]
        results = _results_table(comparison.results)
        page: list[Block] = [
            "# Tasks",
            f"Baseline: {comparison.baseline}. lm-evaluation-harness {self.versions['lm-eval']}.",
            "## In short",
            [*in_short, *remarks],
            "## Scores",
            results,
        ]
        summary: list[Block] = [results]
        if comparison.contrasts:
            gaps = _gap_table(tested, (PAIRS, GAP, INTERVAL, EFFECT, *TESTS), claims=True)
            page += ["## Gaps to the baseline, paired by seed", gaps]
            summary.append(
                _gap_table(tested, (PAIRS, GAP, INTERVAL, replace(T_HOLM, title="p, Holm")))
            )
        if untested:
            page += [
                "## Gaps by the other metrics (not tested)",
                _gap_table(untested, (PAIRS, GAP, INTERVAL)),
            ]
        if comparison.item_tests:
            page += ["## Item by item, one model against one", _item_table(comparison.item_tests)]
        page += ["## Tasks and models", *_inputs(self)]
        page += ["## How the numbers are made", _definitions(self)]
        page += ["## Made by", "```\n" + " \\\n    ".join(map(shlex.join, self.command)) + "\n```"]
        return Document(page, _content(self, remarks), [*summary, remarks])


def _results_table(results: Sequence[Result]) -> Table:
    rows = [
        (
            result.task,
            f"{result.metric} {'↑' if result.higher_is_better else '↓'}",
            result.variant,
            str(result.score.n),
            mean_sd(result.score, DIGITS),
            number(result.stderr, DIGITS),
            f"{result.items:,}",
        )
        for result in results
    ]
    header = ("task", "metric", "variant", "n", "mean ± sd", "standard error", "items")
    return Table(header, rows, text_columns=(0, 1, 2))


def _gap_table(
    contrasts: Sequence[Contrast], columns: Sequence[GapColumn], claims: bool = False
) -> Table:
    rows = [
        GapRow((contrast.task, contrast.metric, contrast.variant), contrast.gap, contrast.metric)
        for contrast in contrasts
    ]
    return gap_table(("task", "metric", "variant"), rows, columns, claims=claims)


def _item_table(tests: Sequence[ItemTest]) -> Table:
    rows = [
        (
            test.task,
            test.metric,
            test.model,
            test.base,
            *(f"{count:,}" for count in (test.items, test.only_model, test.only_base)),
            p_value(test.p),
            p_value(test.p_holm),
        )
        for test in tests
    ]
    header = (
        "task",
        "metric",
        "model",
        "baseline's",
        "items",
        "only the model right",
        "only the baseline's",
        "McNemar p",
        "by Holm",
    )
    return Table(header, rows, text_columns=(0, 1, 2, 3))


def notes(report: TaskReport) -> list[str]:
    """Return notes on limits, few seeds, cut requests and differences between the models."""
    remarks = []
    if report.limit is not None:
        remarks.append(
            f"Only the first {report.limit} items of each task were used (--limit): this is to "
            "try it out, and no result."
        )
    few = sorted(
        {contrast.gap.n if contrast.gap else 0 for contrast in report.comparison.contrasts}
    )
    if few and few[0] < FEWEST_SEEDS:
        sizes = " and ".join(f"n = {n}" for n in few if n < FEWEST_SEEDS)
        remarks.append(
            f"Fewer than {FEWEST_SEEDS} pairs of seeds ({sizes}): no statistical significance is "
            "claimed of variants there."
        )
    names = [measured.name for measured in report.measured]
    cut = {name: max(scores[name].cut for scores in report.scores.values()) for name in names}
    if listed := ", ".join(f"{number(count, 0)} of {name}" for name, count in cut.items() if count):
        remarks.append(
            f"Requests longer than the model's context lose their beginning, here up to {listed} "
            "a model."
        )
    if differing := _differing_settings(report.groups):
        remarks.append(f"The runs also differ in {', '.join(differing)}.")
    model_steps = [model.step for group in report.groups.groups for model in group.runs]
    steps = sorted({"unknown" if step is None else str(step) for step in model_steps})
    if len(steps) > 1:
        remarks.append(
            f"The models are of different steps ({', '.join(steps)}): a gap is not of the variant "
            "alone."
        )
    return remarks


def _differing_settings(groups: Groups[Pretrained]) -> list[str]:
    """Return the keys in which the runs' configurations differ, without those expected to."""
    files = [RunDirectory(model.path).config for model in groups.runs]
    configs = [read_yaml(file, str(file)).values for file in files if file.is_file()]
    settings = [
        {
            f"{section}.{key}": value
            for section, content in by_section(config).items()
            for key, value in content.items()
        }
        for config in configs
    ]
    keys = {key for values in settings for key in values if key not in EXPECTED_TO_DIFFER}
    return [
        key
        for key in sorted(keys)
        if len({setting_text(values.get(key)) for values in settings}) > 1
    ]


def _inputs(report: TaskReport) -> list[Block]:
    """Return the tables of the tasks and of the models."""
    tasks = [
        (
            measured.name,
            part.name if measured.group else NOTHING,
            part.version,
            str(part.shots),
            part.asked[:12],
        )
        for measured in report.measured
        for part in measured.tasks
    ]
    models = [
        (group.name, model.name, number(model.seed, 0), number(model.step, 0), str(model.path))
        for group in report.groups.groups
        for model in group.runs
    ]
    return [
        Table(("task", "part", "version", "shots", "requests, SHA-256"), tasks, (0, 1, 4)),
        Table(("variant", "model", "seed", "step", "directory"), models, (0, 1, 4)),
    ]


def _definitions(report: TaskReport) -> list[str]:
    tests = sum(
        contrast.tested and contrast.gap is not None for contrast in report.comparison.contrasts
    )
    return [
        "Scores are lm-evaluation-harness's own; ↑ means that higher is better, ↓ that lower is. "
        "A group of tasks has the number that the harness makes of its parts.",
        "mean ± sd: over the variant's runs (seeds). Standard error: the harness's own, over "
        f"items, mean of the runs'; where the metric is not a mean, from {BOOTSTRAP:,} bootstrap "
        "resamples.",
        "gap: mean over pairs of seeds of the variant's score minus the baseline's. Interval, "
        "paired t-test, Wilcoxon's test and d_z as in `compare`; Holm's correction is over the "
        f"{tests} tested gaps. Of each task one metric is tested: acc, or else the first that is "
        "0 or 1 for every item, or else the first.",
        "McNemar: two models on the same items, exact and two-sided, of the items that only one "
        f"has right; Holm's correction over the {len(report.comparison.item_tests)} tests of this "
        "kind. It speaks of these two models: what another seed would do is not in it. The items "
        "of a group are those of all its parts.",
    ]


def _content(report: TaskReport, remarks: Sequence[str]) -> dict[str, Any]:
    """Return the content of report.json; the items are in OUT/results."""
    models = [
        {
            "variant": group.name,
            "name": model.name,
            "seed": model.seed,
            "step": model.step,
            "path": str(model.path),
            "tasks": {
                name: _without_items(scores) for name, scores in report.scores[model.path].items()
            },
        }
        for group in report.groups.groups
        for model in group.runs
    ]
    tasks = {
        measured.name: [
            {"task": part.name, "version": part.version, "shots": part.shots, "asked": part.asked}
            for part in measured.tasks
        ]
        for measured in report.measured
    }
    return {
        "experiment": "tasks",
        "versions": dict(report.versions),
        "limit": report.limit,
        "notes": remarks,
        "tasks": tasks,
        "models": models,
        **asdict(report.comparison),
        "contrasts": [
            asdict(contrast) | {"gap": contrast.gap and gap_content(contrast.gap)}
            for contrast in report.comparison.contrasts
        ],
    }


def _without_items(whole: TaskScores) -> dict[str, Any]:
    scores = asdict(whole)["scores"]
    for score in scores.values():
        del score["items"]
    return {"items": whole.items, "cut": whole.cut, "scores": scores}
