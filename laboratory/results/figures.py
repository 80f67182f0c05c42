"""Figures and numbers of docs/results from what is committed there, without any run.

    python -m laboratory.results.figures [PAGE...] [--out docs/results]

Derives the means, gaps, intervals and tests of each report from its runs.csv and compares them with
variants.csv and the tables of report.md; then draws the figures. Costs come from variants.csv,
curves from curves.csv, scores from scores.csv, the figures of `evaluate` from its report.json. A
figure is drawn where it is committed. The exit code is 1 where a published number is not the
derived one.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from laboratory.compare.comparison import Comparison, Cost, Variant
from laboratory.compare.compute import EqualCompute
from laboratory.compare.convergence import Stability
from laboratory.compare.figures import figures as of_comparison
from laboratory.compare.report import as_json
from laboratory.compare.tables import gap_table
from laboratory.compare.trend import Trend, fit_trends, trend_table
from laboratory.reporting.plots import (
    COLOURS,
    DASHES,
    in_lines,
    label,
    legend_below,
    new_figure,
    style_of,
    write_figures,
)
from laboratory.results.tables import RESULTS, table
from laboratory.runs.finished import FinishedRun, ModelSize, StateBytes
from laboratory.study.gaps import NATS, PairedGap, adjust, paired_gap
from laboratory.study.seeds import Groups
from pretrain.reporting.tables import Table
from pretrain.reporting.text import spread

DERIVED = ("validation_loss.", "validation_perplexity.", "perplexity.", "gap.")
"""Columns of variants.csv that runs.csv gives; the others are of the runs' records."""
POINTS = 100
"""Points of a run's curve in curves.csv, at evenly spaced tokens."""
Row = Mapping[str, str]


def rebuilt(folder: Path) -> Comparison:
    """Return the comparison of a folder with runs.csv, variants.csv and report.md.

    It has gaps, tests, trends and costs in FLOPs, without runs and their records.
    """
    rows = table(folder / "variants.csv")
    runs = table(folder / "runs.csv")
    report = (folder / "report.md").read_text()
    about = re.search(r"^Baseline: .* Subject: (\S+)\. Each", report, re.MULTILINE)
    subject = about[1] if about else ""
    members = {
        row["variant"]: [run for run in runs if run["variant"] == row["variant"]] for row in rows
    }
    losses = {
        name: by_seed(member_rows, "validation_loss") for name, member_rows in members.items()
    }
    gaps = adjust(
        [
            paired_gap(row["baseline"], losses[row["variant"]], losses[row["baseline"]], NATS)
            if row["variant"] != row["baseline"]
            else None
            for row in rows
        ]
    )
    variants = [
        variant_of(row, members[row["variant"]], gap) for row, gap in zip(rows, gaps, strict=True)
    ]
    baselines = {row["baseline"]: row["label"] for row in rows if row["variant"] == row["baseline"]}
    baseline = min(baselines) if len(baselines) == 1 else min(baselines.values())
    return Comparison(
        baseline,
        (subject,) if subject else (),
        tuple(variants),
        trends_of(variants, members, subject),
        notes=(),
        groups=Groups[FinishedRun](baseline, (), {}),
        match="flops" if "\nGaps are at equal FLOPs" in report else "tokens",
    )


def by_seed(runs: Sequence[Row], column: str) -> dict[int, float]:
    """Return {seed: number} of a column.

    Args:
        runs: Rows of runs.csv; those with an empty cell are left out.
        column: Name of the column.
    """
    return {int(run["seed"]): float(run[column]) for run in runs if run[column]}


def variant_of(row: Row, runs: Sequence[Row], gap: PairedGap | None) -> Variant:
    """Return a variant with the fields that the tables hold.

    Args:
        row: Its row in variants.csv.
        runs: Its runs' rows in runs.csv.
        gap: Its gap to the baseline.
    """
    loss = spread([*by_seed(runs, "validation_loss").values()])
    sources = [column for column in runs[0] if column.startswith("perplexity.")]
    bits = number(row.get("validation_bits_per_byte"))
    cost = number(row.get("compute.cost"))
    return Variant(
        name=row["variant"],
        label=row["label"],
        stratum=row["stratum"],
        baseline=row["baseline"],
        runs=(),
        validation_loss=loss,
        validation_perplexity=spread([*by_seed(runs, "validation_perplexity").values()]),
        perplexity_by_source={
            column.removeprefix("perplexity."): spread([*by_seed(runs, column).values()])
            for column in sources
        },
        gap=gap,
        source_gaps={},
        reaches=(),
        stability=Stability(None, None, None, spikes=0, records=0),
        cost=NO_COST,
        theory=None,
        bytes_per_token=loss.mean / math.log(2) / bits if loss and bits else None,
        compute=EqualCompute(
            cost, number(row.get("compute.learned")), slope=number(row.get("compute.slope"))
        ),
    )


NO_COST = Cost(
    step_seconds=None,
    tokens_per_second=None,
    mfu=None,
    hfu=None,
    size=ModelSize(0, 0),
    states=StateBytes(
        weight_bytes=0,
        frozen_bytes=0,
        gradient_bytes=0,
        optimizer_state_bytes=0,
        checkpoint_bytes=0,
    ),
    peak_device_bytes=None,
    peak_host_bytes=None,
)


def number(text: str | None) -> float | None:
    """Return a cell of a CSV file as a number; None for an empty or a missing one."""
    return float(text) if text else None


def trends_of(
    variants: Sequence[Variant], members: Mapping[str, Sequence[Row]], subject: str
) -> tuple[Trend, ...]:
    """Return the lines through the gaps over the subject, as `compare` fits them.

    Args:
        variants: Variants with their gaps.
        members: {name of a variant: its runs' rows in runs.csv}.
        subject: Name of the subject; "" for none.
    """
    gaps: dict[str, dict[float, PairedGap]] = {}
    of_baseline = {variant.name: variant.stratum for variant in variants}
    for variant in variants:
        if subject and variant.gap and of_baseline[variant.baseline] == variant.stratum:
            short = subject.rpartition(".")[2]
            settings = dict(part.split("=") for part in variant.stratum.split())
            text = settings.get(short) or members[variant.name][0]["tokens"]
            value = float(text)
            exact = int(value) if value.is_integer() else value
            gaps.setdefault(variant.label, {})[exact] = variant.gap
    return fit_trends(subject, gaps)[0]


def deviations(folder: Path) -> list[str]:
    """Return a sentence for each published number of a comparison that runs.csv does not give.

    Looked at are the numbers of variants.csv and the lines of report.md's tables.
    """
    comparison = rebuilt(folder)
    derived = map(columns_of, as_json(comparison)["variants"])
    sentences = [
        f"{folder}/variants.csv: {name} of {row['variant']} is {published[name]}, not {row[name]}"
        for row, published in zip(derived, table(folder / "variants.csv"), strict=True)
        for name in row.keys() & published.keys()
        if name.startswith(DERIVED) and not close(row[name], published[name])
    ]
    tables = [gap_table(comparison)] if comparison.others else []
    tables += [trend_table(comparison.trends)] if comparison.trends else []
    text = (folder / "report.md").read_text()
    lines = [line for derived_table in tables for line in lines_as_published(derived_table, text)]
    return sentences + [f"{folder}/report.md: lacks {line}" for line in lines if line not in text]


def columns_of(variant: Mapping[str, Any]) -> dict[str, str]:
    """Return the derived columns of variants.csv for a variant of comparison.json."""
    spreads = {key: variant[key] for key in ("validation_loss", "validation_perplexity")}
    by_source = variant["perplexity_by_source"]
    spreads |= {f"perplexity.{source}": by_source[source] for source in by_source}
    groups = {**spreads, "gap": variant["gap"]}
    columns = {
        f"{group}.{key}": "" if value is None else str(value)
        for group, values in groups.items()
        for key, value in (values or {}).items()
        if not isinstance(value, (list, tuple))
    }
    pairs = len(variant["gap"]["seeds"]) if variant["gap"] else 0
    return {"variant": variant["name"], **columns, "gap.pairs": str(pairs)}


def lines_as_published(derived: Table, text: str) -> list[str]:
    """Return the lines of a table with the columns of a published report.

    Args:
        derived: The table.
        text: The report; columns that an older one does not have are left out.
    """
    start = "| " + " | ".join(derived.header[:2]) + " |"
    header = next(line for line in text.splitlines() if line.startswith(start))
    titles = header[2:-2].split(" | ")
    kept: list[int] = []
    for index, title in enumerate(derived.header):
        if len(kept) < len(titles) and title == titles[len(kept)]:
            kept.append(index)
    return ["| " + " | ".join(row[index] for index in kept) + " |" for row in derived.rows]


def close(one: str, other: str) -> bool:
    """Return whether two cells, `one` and `other`, are equal numbers up to rounding, or both empty.

    Args:
        one: A cell.
        other: Another.
    """
    if not (one and other):
        return one == other
    return math.isclose(float(one), float(other), rel_tol=1e-9, abs_tol=1e-12)


def read_curves(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return {name of a run: (tokens, training losses in nats per token)}, each `[points]`."""
    curves = {}
    for row in table(path):
        losses = np.array(row["losses"].split(), dtype=np.float64)
        tokens = np.linspace(float(row["first"]), float(row["last"]), len(losses))
        curves[row["name"]] = (tokens, losses)
    return curves


def loss_figure(folder: Path) -> Figure:
    """Draw the mean curve of each variant's runs."""
    curves = read_curves(folder / "curves.csv")
    members: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for run in table(folder / "runs.csv"):
        members.setdefault(run["variant"], []).append(curves[run["name"]])
    figure, (plot,) = new_figure(1, 1, height=3.6 + 0.25 * len(members))
    shown = []
    for index, (name, variant_curves) in enumerate(members.items()):
        first = max(tokens[0] for tokens, _ in variant_curves)
        shared = np.linspace(first, min(tokens[-1] for tokens, _ in variant_curves), POINTS)
        mean = np.mean([np.interp(shared, *curve) for curve in variant_curves], axis=0)
        shown += [mean[POINTS // 8 :].min(), mean[POINTS // 8 :].max()]
        look = {"color": style_of(index, COLOURS), "linestyle": style_of(index, DASHES)}
        legend_name = f"{in_lines(name, 60)} (n = {len(variant_curves)})"
        plot.plot(shared, mean, linewidth=1.4, label=legend_name, **look)
    plot.set_ylim(min(shown) - 0.05, max(shown) + 0.05)  # the first steps would hide the rest
    plot.xaxis.set_major_formatter(EngFormatter())
    label(plot, "", "training tokens", "training loss, nats/token")
    legend_below(figure, plot, rows=len(members), handle=4.5)
    return figure


FROM_TABLES: Mapping[str, Callable[[Comparison], Figure | None]] = {
    "gap": lambda comparison: of_comparison(comparison)["gap"](),
}


def draw(folder: Path, out: Path) -> None:
    """Draw the figures that are committed in a folder anew, as SVG.

    Args:
        folder: Folder with the data of a report of `compare` or `evaluate`.
        out: Folder of the figures, made if missing.
    """
    makers: dict[str, Callable[[], Figure | None]] = {}
    for committed in sorted(folder.glob("*.svg")):
        name = committed.stem
        if name in FROM_TABLES:
            makers[name] = partial(FROM_TABLES[name], rebuilt(folder))
        elif name == "loss":
            makers[name] = partial(loss_figure, folder)
        elif name == "scores":
            from laboratory.results.scores import scores_figure  # which reads tables as here

            makers[name] = scores_figure
        elif (folder / "report.json").exists():
            from laboratory.results.recorded import FROM_JSON  # with torch, which takes seconds

            content = json.loads((folder / "report.json").read_text())
            makers[name] = partial(FROM_JSON[name], content)
    out.mkdir(parents=True, exist_ok=True)
    write_figures(makers, out)
    for name in makers:
        (out / f"{name}.png").unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and check the pages that the arguments name; 1 where a number deviates, else 0."""
    parser = argparse.ArgumentParser(prog="laboratory.results.figures", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="folders in docs/results; all")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    for page in options.pages:
        if not (RESULTS / page).is_dir():
            parser.error(f"there is no page '{page}' in {RESULTS}")
    sentences = []
    for page in options.pages or [""]:
        for report in sorted((RESULTS / page).rglob("report.md")):
            draw(report.parent, options.out / report.parent.relative_to(RESULTS))
            if report.with_name("variants.csv").exists():
                sentences += deviations(report.parent)
    print(*sentences, f"{len(sentences)} numbers deviate", sep="\n")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
