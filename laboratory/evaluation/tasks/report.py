"""Report of `evaluate tasks`: the harness's scores, their gaps by seed, and by item.

    by seed   mean over seeds of (score of the variant - score of the baseline): its uncertainty is
              that of trainings
    by item   mean over items of (value of one model - value of one of the baseline): its
              uncertainty is that of items

Of a task's metrics one is tested, or Holm's correction would pay for saying the same thing twice:
`acc` where there is one, else the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from laboratory.evaluation.tasks.harness import BOOTSTRAP, Score, Scores
from laboratory.finetuning.models import Pretrained
from laboratory.study.gaps import FEWEST_SEEDS, SCORES, PairedGap, adjusted, paired_gap, with_gap
from laboratory.study.report import Block, Document
from laboratory.study.seeds import Group, Groups
from laboratory.study.tables import (
    EFFECT,
    GAP,
    INTERVAL,
    PAIRS,
    TESTS,
    GapRow,
    gap_sentence,
    gap_table,
)
from pretrain.reporting.tables import Table
from pretrain.reporting.text import mean_sd, number, spread, spread_of_all

DIGITS = 4
_OF_PAIRS = ("seeds", "differences")
DEFINITIONS = (
    "Scores are lm-evaluation-harness's own; ↑ means that higher is better, ↓ that lower is.",
    "mean ± sd: over the variant's runs (seeds). Standard error: the harness's own, over "
    f"items, mean of the runs'; where the metric is not a mean, from {BOOTSTRAP:,} bootstrap "
    "resamples.",
    "Gaps, intervals and tests are those of `compare`, over seeds, and over the items of two "
    "models. Of each task one metric is tested: acc, or else the first; Holm's correction is "
    "over all of these.",
)


@dataclass(frozen=True)
class Contrast:
    """Gap by one metric of a task, of a variant by seed, or of a model by item.

    Attributes:
        compared: Name of the variant or model.
        tested: The metric is the one of the task that is tested; others have no p values.
        gap: None without a seed in common.
    """

    task: str
    metric: str
    compared: str
    tested: bool
    gap: PairedGap | None

    @property
    def row(self) -> GapRow:
        """Return the row of a table."""
        return GapRow((self.task, self.metric, self.compared), self.gap, self.metric)


def tested_metric(scores: Mapping[str, Score]) -> str:
    """Return the metric of a task that is tested."""
    return "acc" if "acc" in scores else next(iter(scores), "")


def compare_tasks(
    groups: Groups[Pretrained], scores: Mapping[Path, Scores]
) -> tuple[list[Contrast], list[Contrast]]:
    """Return the gaps by seed and by item, each with Holm's correction over the tested ones.

    Args:
        scores: {path of a model: its scores}.
    """
    base = groups.named(groups.baseline)
    others = [group for group in groups.groups if group is not base]
    pairs = [pair for group in others for pair in _pairs(group, base)]
    by_seed: list[Contrast] = []
    by_item: list[Contrast] = []
    for task, task_scores in next(iter(scores.values())).items():
        tested = tested_metric(task_scores)
        for metric, group in product(task_scores, others):
            values, base_values = (_by_seed(side, scores, task, metric) for side in (group, base))
            gap = paired_gap(base.name, values, base_values, SCORES)
            if gap and metric != tested:
                gap = replace(gap, t=None, t_p=None, wilcoxon=None, wilcoxon_p=None)
            by_seed.append(Contrast(task, metric, group.name, tested=metric == tested, gap=gap))
        for model, other in pairs:
            values, base_values = (
                dict(enumerate(scores[side.path][task][tested].items)) for side in (model, other)
            )
            if gap := paired_gap(other.name, values, base_values, SCORES):
                by_item.append(Contrast(task, tested, model.name, tested=True, gap=gap))
    return adjusted(by_seed), adjusted(by_item)


def _by_seed(
    group: Group[Pretrained], scores: Mapping[Path, Scores], task: str, metric: str
) -> dict[int, float]:
    """Return {seed: finite score}; an unknown seed counts as -1."""
    values = {
        -1 if model.seed is None else model.seed: scores[model.path][task][metric].value
        for model in group.runs
    }
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _pairs(
    group: Group[Pretrained], base: Group[Pretrained]
) -> list[tuple[Pretrained, Pretrained]]:
    """Return pairs of models of equal seed, or the only two models whatever their seeds."""
    seeds = {model.seed: model for model in base.runs}
    pairs = [(model, seeds[model.seed]) for model in group.runs if model.seed in seeds]
    if not pairs and len(group.runs) == len(base.runs) == 1:
        pairs = [(group.runs[0], base.runs[0])]
    return pairs


def tasks_document(
    groups: Groups[Pretrained],
    scores: Mapping[Path, Scores],
    facts: Mapping[str, Any],
    limit: int | None,
) -> Document:
    """Return all forms of the report.

    Args:
        scores: {path of a model: its scores}.
        facts: Versions of packages, and versions and shots of tasks, for report.json and the page.
        limit: The first items of each task, at most; None: all.
    """
    by_seed, by_item = compare_tasks(groups, scores)
    notes = _notes(by_seed, limit)
    score_table = _score_table(groups, scores)
    columns = (PAIRS, GAP, INTERVAL, EFFECT, *TESTS)
    sentences = [
        gap_sentence(f"{contrast.task}: {contrast.compared}", contrast.gap, contrast.metric)
        for contrast in by_seed
        if contrast.tested
    ]
    versions = ", ".join(f"{name} {installed}" for name, installed in facts["versions"].items())
    page: list[Block] = [
        "# Tasks",
        f"Baseline: {groups.baseline}. {versions}.",
        "## In short",
        [*sentences, *notes],
        "## Scores",
        score_table,
    ]
    if by_seed:
        names = ("task", "metric", "variant")
        rows = [contrast.row for contrast in by_seed]
        page += ["## Gaps to the baseline, paired by seed", gap_table(names, rows, columns)]
    if by_item:
        rows = [contrast.row for contrast in by_item]
        page += [
            "## Gaps of one model to one, paired by item",
            gap_table(
                ("task", "metric", "model"), rows, (replace(PAIRS, title="items"), *columns[1:])
            ),
        ]
    page += ["## Tasks", _task_table(facts), "## How the numbers are made", DEFINITIONS]
    summary: list[Block] = [score_table, [*sentences, *notes]]
    return Document(
        page,
        {
            "experiment": "tasks",
            "baseline": groups.baseline,
            "limit": limit,
            **facts,
            "models": _models(groups, scores),
            "notes": notes,
            "contrasts": [with_gap(contrast) for contrast in by_seed],
            "items": [_item_content(contrast) for contrast in by_item],
        },
        summary,
    )


def _score_table(groups: Groups[Pretrained], scores: Mapping[Path, Scores]) -> Table:
    rows = []
    for task, task_scores in next(iter(scores.values())).items():
        for metric, first in task_scores.items():
            for group in groups.groups:
                of_group = [scores[model.path][task][metric] for model in group.runs]
                error = spread_of_all([score.stderr for score in of_group])
                row = (
                    task,
                    f"{metric} {'↑' if first.higher_is_better else '↓'}",
                    group.name,
                    str(len(of_group)),
                    mean_sd(spread([score.value for score in of_group]), DIGITS),
                    number(None if error is None else error.mean, DIGITS),
                )
                rows.append(row)
    header = ("task", "metric", "variant", "n", "mean ± sd", "standard error")
    return Table(header, rows, text_columns=(0, 1, 2))


def _task_table(facts: Mapping[str, Any]) -> Table:
    rows = [
        (task, str(task_facts["version"]), str(task_facts["shots"]), f"{task_facts['items']:,}")
        for task, task_facts in facts["tasks"].items()
    ]
    return Table(("task", "version", "shots", "items"), rows)


def _notes(contrasts: Sequence[Contrast], limit: int | None) -> list[str]:
    notes = []
    if limit is not None:
        notes.append(
            f"Only the first {limit} items of each task were used (--limit): this is to try it "
            "out, and no result."
        )
    if any(contrast.gap is None or contrast.gap.n < FEWEST_SEEDS for contrast in contrasts):
        notes.append(
            f"Fewer than {FEWEST_SEEDS} pairs of seeds: no statistical significance is claimed of "
            "variants."
        )
    return notes


def _models(groups: Groups[Pretrained], scores: Mapping[Path, Scores]) -> list[dict[str, Any]]:
    """Return each model with its scores, without those of items, which are in OUT/results."""
    return [
        {
            "variant": group.name,
            "name": model.name,
            "seed": model.seed,
            "step": model.step,
            "path": str(model.path),
            "tasks": {
                task: {metric: _without_items(score) for metric, score in task_scores.items()}
                for task, task_scores in scores[model.path].items()
            },
        }
        for group in groups.groups
        for model in group.runs
    ]


def _without_items(score: Score) -> dict[str, Any]:
    return {key: value for key, value in asdict(score).items() if key != "items"}


def _item_content(contrast: Contrast) -> dict[str, Any]:
    """Return a gap by item; the items themselves are in OUT/results."""
    content = with_gap(contrast)
    gap = {key: value for key, value in content["gap"].items() if key not in _OF_PAIRS}
    return content | {"gap": {"n": len(content["gap"]["seeds"]), **gap}}
