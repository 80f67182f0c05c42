"""The drawings of contrasts, from the runs that docs/results holds.

findings.svg     what freezing costs in the GPT-2-like recipe, from the runs.csv that FINDINGS names
modern.svg       the same in the modern recipe, from those that MODERN names
equal_cost.svg   the modern recipe at equal tokens, FLOPs, hours and seconds
longer.svg       frozen structured rows at these costs by length, to 16 M tokens
when.svg         what freezing costs there by the step at which it comes, from WHEN
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from pathlib import Path

from docs.figures.svg import Scale, drawing, line, scale, text
from laboratory.results import equal_cost
from laboratory.results.equal_cost import DENSE, MULTI_QUERY
from laboratory.results.tables import table
from pretrain.api import paired_gaps

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Finding:
    """A contrast of two designs, paired by seed.

    Attributes:
        text: Words of its row on length and text.
        page: Folder of docs/results with runs.csv, or with a trial's trial.json.
        design, baseline: Names of the runs of both designs, without their seeds.
        seeds: Number of seeds that are taken, the lowest first; None: all.
        baseline_page: Folder of the baseline's runs where it is another.
    """

    text: str
    page: str
    design: str
    baseline: str
    seeds: int | None = None
    baseline_page: str = ""


Groups = dict[str, list[Finding]]
"""The contrasts of a figure under the headings of their groups."""


@dataclass(frozen=True)
class Gap:
    """A mean of paired differences in nats, the ends of its 95 % interval, the number of pairs."""

    mean: float
    low: float
    high: float
    n: int


Rows = dict[str, list[tuple[str, Gap]]]
"""Rows of a figure, each with its words and its gap, under the headings of their groups."""

ALONE, SAME = "demo/sweeps/{}/orthogonal", "demo/sweeps/{}/vanilla"
FROZEN, RIVAL = "monarch_shared_conv4", "vanilla_conv4"
FINDINGS: Groups = {
    "1. Freezing alone, to trained attention, equal tokens": [
        Finding("0.3 M tokens", "tokens", ALONE.format("ablations"), SAME.format("ablations")),
        Finding("0.3 M, nine other seeds", "trials/freezing", "orthogonal", "vanilla"),
        Finding("0.6 M", "tokens", ALONE.format("structured"), SAME.format("structured")),
        Finding("1.2 M", "tokens", ALONE.format("tokens"), SAME.format("tokens")),
    ],
    "2. A frozen design, to trained attention with the same convolution, equal FLOPs": [
        Finding("0.5 M tokens, demo's text", "thin_demo/to_slow", FROZEN, f"{RIVAL}_slow"),
        Finding("0.5 M, documentation, own rates", "headline", FROZEN, RIVAL),
        Finding("0.5 M, articles", "wiki", FROZEN, RIVAL),
        *(
            Finding(
                f"{length} M, documentation",
                f"widths/w128-{run}",
                f"{FROZEN}-w128-{run}",
                f"{RIVAL}-w128-{run}",
            )
            for length, run in ((1, "warm"), (2, "t2000"), (4, "t4000"), (8, "t8000"))
        ),
    ],
    "3. The same design frozen, to it trained, equal FLOPs": [
        Finding("0.5 M tokens, documentation", "thin", FROZEN, f"trained_{FROZEN}"),
        Finding("0.5 M, demo's text", "thin_demo", FROZEN, f"trained_{FROZEN}", seeds=6),
    ],
}
FOUND = (
    "What freezing queries and keys costs: per cent of perplexity in three contrasts, "
    "with 95 % intervals"
)
LENGTHS = {500: "0.5 M tokens", 1000: "1 M", 2000: "2 M", 4000: "4 M"}
LONG = "modern/long"
LONGER = {8000: "8 M", 16000: "16 M"}


MODERN: Groups = {
    "Dense rows frozen, to the same trained; neither with the short convolution": [
        Finding("0.5 M tokens", "modern", "orthogonal-t500", "vanilla-t500"),
    ],
    "Structured rows frozen, to dense rows trained; both with the short convolution": [
        Finding("4 M tokens", "modern", f"{FROZEN}-t4000", f"{RIVAL}-t4000"),
        Finding("… of that the structure", "modern", f"trained_{FROZEN}-t4000", f"{RIVAL}-t4000"),
        Finding("… of that the freezing", "modern", f"{FROZEN}-t4000", f"trained_{FROZEN}-t4000"),
    ],
    "Structured rows frozen, with the convolution, to plain trained attention without it": [
        Finding(
            "4 M tokens",
            "modern",
            f"{FROZEN}-t4000",
            "vanilla-t4000",
            baseline_page="modern/dense",
        ),
    ],
}
MODERN_TITLE = (
    "The modern recipe: per cent of perplexity at equal tokens in five contrasts, with 95 % "
    "intervals"
)

WHEN: Groups = {
    "Structured rows, frozen from the start or after a share of the steps, to trained on": [
        Finding(words, "modern/phases/structure", f"{name}-t2000", f"trained_{FROZEN}-t2000")
        for words, name in (
            ("from the start", FROZEN),
            ("after a tenth", f"tenth_{FROZEN}"),
            ("after a quarter", f"early_{FROZEN}"),
            ("after a half", f"half_{FROZEN}"),
        )
    ],
    "Dense rows, frozen after a share of the steps, to trained on": [
        Finding(words, "modern/phases/dense", f"{name}-t2000", f"{RIVAL}-t2000")
        for words, name in (
            ("after a tenth", f"tenth_{RIVAL}"),
            ("after a quarter", f"early_{RIVAL}"),
            ("after a half", f"half_{RIVAL}"),
        )
    ],
}
WHEN_TITLE = (
    "When to freeze: per cent of perplexity after 2 M tokens by the step of the freeze, with 95 % "
    "intervals"
)

COSTS_TITLE = (
    "The modern recipe at equal tokens, FLOPs, GPU-hours and seconds: per cent of perplexity after "
    "4 M tokens, with 95 % intervals"
)
COMPARED = {
    "Structured rows frozen from the start, to dense rows trained": (FROZEN, DENSE),
    "Structured rows frozen after a quarter of the steps, to dense rows trained": (
        f"early_{FROZEN}",
        DENSE,
    ),
    "Structured rows trained, to dense rows trained": (f"trained_{FROZEN}", DENSE),
    "Structured rows frozen from the start, to multi-query attention": (FROZEN, MULTI_QUERY),
}

LONGER_TITLE = (
    "Structured rows frozen from the start, to dense rows trained: per cent of perplexity by "
    "length at equal tokens, FLOPs, GPU-hours and seconds, with 95 % intervals"
)


def findings() -> str:
    """Draw the GPT-2-like recipe."""
    rows = of_findings(FINDINGS)
    return contrasts(FOUND, rows, ends=(-15, 19), sides="frozen", ratio="frozen to trained")


def modern() -> str:
    """Draw the modern recipe."""
    rows = of_findings(MODERN)
    ratio = "the first to the second"
    return contrasts(MODERN_TITLE, rows, ends=(-10, 35), sides="the first", ratio=ratio)


def when() -> str:
    """Draw the modern recipe after 2 M tokens, frozen earlier or later."""
    rows = of_findings(WHEN)
    return contrasts(WHEN_TITLE, rows, ends=(-2, 12), sides="frozen", ratio="frozen to trained on")


def equal_costs() -> str:
    """Draw the modern recipe after 4 M tokens, where saved compute buys tokens."""
    losses = equal_cost.read_losses([equal_cost.RUNS])
    tokens = max(losses[DENSE])

    rows: Rows = {}
    for heading, pair in COMPARED.items():
        for cost in equal_cost.COSTS:
            spent = [at_equal_cost(losses, name, tokens, cost) for name in pair]
            rows.setdefault(heading, []).append((f"equal {cost}", paired(*spent)))
    ratio = "the first to the second"
    return contrasts(COSTS_TITLE, rows, ends=(-10, 10), sides="the first", ratio=ratio)


def at_equal_cost(losses: equal_cost.Losses, name: str, tokens: int, cost: str) -> dict[int, float]:
    """Return {seed: loss} as if a variant had spent what it saves on tokens."""
    return equal_cost.at_equal_share(losses, name, tokens, equal_cost.saved_share(name, cost))


def longer() -> str:
    """Draw rows that are frozen from the start, by length."""
    files = [equal_cost.RUNS, RESULTS / LONG / "runs.csv"]
    losses = equal_cost.read_losses(files)
    rows: Rows = {}
    for cost in equal_cost.COSTS:
        rows[f"At equal {cost}"] = [
            (
                length,
                paired(
                    at_equal_cost(losses, FROZEN, 1024 * steps, cost),
                    at_equal_cost(losses, DENSE, 1024 * steps, cost),
                ),
            )
            for steps, length in (LENGTHS | LONGER).items()
        ]
    return contrasts(LONGER_TITLE, rows, ends=(-10, 10), sides="frozen", ratio="frozen to trained")


def of_findings(groups: Groups) -> Rows:
    return {
        heading: [(finding.text, gap(finding)) for finding in findings_of_group]
        for heading, findings_of_group in groups.items()
    }


def contrasts(
    title: str, groups: Rows, *, ends: tuple[float, float], sides: str, ratio: str
) -> str:
    """Draw each contrast as a row with its interval, hollow where the interval holds 0.

    Args:
        ends: Ends of the axis, per cent of perplexity.
        sides: Side that is better left of 0 and worse right of it.
        ratio: Words for the two perplexities that are compared.
    """
    rows = sum(len(rows_of_group) + 1.4 for rows_of_group in groups.values())
    bottom = 34 + 25 * rows
    x = scale(*ends, 270, 690)
    apart = 10 if ends[1] - ends[0] > 40 else 5
    marks = [percent for percent in range(-100, 100, apart) if ends[0] <= percent <= ends[1]]
    parts = [text(270, 20, f"{sides} is better", "small")]
    parts.append(text(690, 20, f"{sides} is worse", "small end"))
    height = 30.0
    for heading, rows_of_group in groups.items():
        height += 29
        parts.append(text(20, height, heading, "title"))
        for percent in marks:
            kind = "grid" if percent else "axis dashed"
            parts.append(
                line(
                    x(percent),
                    height + 8,
                    x(percent),
                    height + 25 * len(rows_of_group) + 6,
                    kind=kind,
                )
            )
        for words, measured_gap in rows_of_group:
            height += 25
            parts.append(contrast(words, measured_gap, height, x))
        height += 6
    for percent in marks:
        words = f"{percent:+d} %".replace("-", "−") if percent else "0"
        parts.append(text(x(percent), bottom + 20, words, "small middle"))
    parts.append(text(480, bottom + 42, f"perplexity, {ratio}", "small middle"))
    return drawing(title, 860, int(bottom) + 56, parts)


def contrast(words: str, measured_gap: Gap, height: float, x: Scale) -> str:
    """Draw a row: the words, the interval, the number."""
    mean, low, high = (
        100 * (exp(value) - 1) for value in (measured_gap.mean, measured_gap.low, measured_gap.high)
    )
    held = low <= 0 <= high
    mark = f'<circle class="{"open" if held else ""}" cx="{x(mean):.1f}" cy="{height - 5}" r="5"/>'
    bar = line(x(low), height - 5, x(high), height - 5)
    value = f"{mean:+.1f} %, n = {measured_gap.n}".replace("-", "−")
    words = text(36, height, words, "small") + text(845, height, value, "small end")
    return f'<g class="frozen">{bar}{mark}</g>{words}'


def gap(finding: Finding) -> Gap:
    """Return the gap of a contrast, from its page."""
    page = RESULTS / finding.page
    if (page / "trial.json").is_file():
        trial = json.loads((page / "trial.json").read_text())
        return Gap(trial["mean"], trial["low"], trial["high"], trial["n"])
    runs = table(page / "runs.csv")
    if finding.baseline_page:
        runs += table(RESULTS / finding.baseline_page / "runs.csv")
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        losses_by_seed = losses.setdefault(run["name"].rpartition("-")[0], {})
        losses_by_seed[int(run["seed"])] = float(run["validation_loss"])
    chosen = sorted(losses[finding.design])[: finding.seeds]
    design = {seed: losses[finding.design][seed] for seed in chosen}
    return paired(design, losses[finding.baseline])


def paired(losses: dict[int, float], baseline: dict[int, float]) -> Gap:
    """Return the gap of two models' losses over the seeds that both have."""
    pairs = paired_gaps({"own": losses, "baseline": baseline}, "baseline")["own"]
    assert pairs.low is not None and pairs.high is not None, pairs
    return Gap(pairs.mean, pairs.low, pairs.high, pairs.n)


DRAWINGS: dict[str, Callable[[], str]] = {
    "equal_cost.svg": equal_costs,
    "findings.svg": findings,
    "longer.svg": longer,
    "modern.svg": modern,
    "when.svg": when,
}
