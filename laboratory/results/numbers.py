"""Numbers of docs/results again, from what is committed there, without any run.

    python -m laboratory.results.numbers [PAGE...]

Derives the means, gaps, intervals and tests of each report from its runs.csv and compares them with
variants.csv and the tables of report.md. What pages state in words is derived as `stated` says, and
records of runs are held against tables and seals. The exit code is 1 where a published number is
not the derived one.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laboratory.compare.trend import fit_trends
from laboratory.results import records, stated
from laboratory.results.tables import RESULTS, table
from laboratory.study.gaps import NATS, PairedGap, adjust, paired_gap
from pretrain.reporting.text import spread

LOSS = "validation_loss"
Row = Mapping[str, str]


def by_seed(runs: Sequence[Row], column: str) -> dict[int, float]:
    """Return {seed: number} of a column of runs.csv, empty cells left out."""
    return {int(run["seed"]): float(run[column]) for run in runs if run[column]}


def deviations(folder: Path) -> list[str]:
    """Return a sentence for each published number of a comparison that runs.csv does not give.

    Args:
        folder: Folder with runs.csv, variants.csv and report.md.
    """
    rows = table(folder / "variants.csv")
    runs = table(folder / "runs.csv")
    members = {
        row["variant"]: [run for run in runs if run["variant"] == row["variant"]] for row in rows
    }
    losses = {name: by_seed(member_rows, LOSS) for name, member_rows in members.items()}
    gaps = adjust(
        [
            paired_gap(row["baseline"], losses[row["variant"]], losses[row["baseline"]], NATS)
            if row["variant"] != row["baseline"]
            else None
            for row in rows
        ]
    )
    sentences = [
        f"{folder}/variants.csv: {name} of {row['variant']} is {row[name]}, not {value}"
        for row, gap in zip(rows, gaps, strict=True)
        for name, value in derived_columns(members[row["variant"]], gap)
        if name in row and not close(row[name], value)
    ]
    text = (folder / "report.md").read_text()
    lines = text.splitlines()
    expected = [
        (row["variant"], f"| {gap.n} | {cells(gap)} |")
        for row, gap in zip(rows, gaps, strict=True)
        if gap
    ]
    expected += slopes(rows, gaps, members, text)
    return sentences + [
        f"{folder}/report.md: lacks | {name} {words}"
        for name, words in expected
        if not any(line.startswith(f"| {name} |") and words in line for line in lines)
    ]


def derived_columns(runs: Sequence[Row], gap: PairedGap | None) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the columns of variants.csv that runs.csv gives.

    Args:
        runs: Rows of a variant in runs.csv.
        gap: Its gap to the baseline.
    """
    for column in runs[0]:
        if column in (LOSS, "validation_perplexity") or column.startswith("perplexity."):
            values = spread([*by_seed(runs, column).values()])
            if values:
                yield from ((f"{column}.{key}", value) for key, value in asdict(values).items())
    if gap:
        yield "gap.pairs", gap.n
        yield from ((f"gap.{key}", value) for key, value in asdict(gap).items())


def cells(gap: PairedGap) -> str:
    """Return the mean and the interval of a gap, where there is one, as cells of a report."""
    mean = NATS.signed(gap.mean)
    return mean if gap.low is None else f"{mean} | {NATS.interval(gap)}"


def slopes(
    rows: Sequence[Row],
    gaps: Sequence[PairedGap | None],
    members: Mapping[str, Sequence[Row]],
    report: str,
) -> list[tuple[str, str]]:
    """Return label and cells of each line through the gaps over the subject.

    Args:
        rows: Rows of variants.csv.
        gaps: Their gaps.
        members: {variant: its rows of runs.csv}.
        report: report.md, which names the subject.
    """
    about = re.search(r"^Baseline: .* Subject: (\S+)\. Each", report, re.MULTILINE)
    if about is None:
        return []
    strata = {row["variant"]: row["stratum"] for row in rows}
    by_label: dict[str, dict[float, PairedGap]] = {}
    for row, gap in zip(rows, gaps, strict=True):
        if gap and strata[row["baseline"]] == row["stratum"]:
            settings = dict(part.split("=") for part in row["stratum"].split())
            short = about[1].rpartition(".")[2]
            value = float(settings.get(short) or members[row["variant"]][0]["tokens"])
            by_label.setdefault(row["label"], {})[value] = gap
    trends, _ = fit_trends(about[1], by_label)
    return [(trend.label, f"| {trend.slope.n} | {cells(trend.slope)} |") for trend in trends]


def close(published: str, derived: Any) -> bool:
    """Return whether a cell is the derived number up to rounding, or both are empty."""
    if not published or derived is None:
        return not published and derived is None
    return math.isclose(float(published), float(derived), rel_tol=1e-9, abs_tol=1e-12)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages that the arguments name; 1 where a number deviates, else 0."""
    parser = argparse.ArgumentParser(prog="laboratory.results.numbers", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="folders in docs/results; all")
    options = parser.parse_args(arguments)
    for page in options.pages:
        if not (RESULTS / page).is_dir():
            parser.error(f"there is no page '{page}' in {RESULTS}")
    sentences = stated.deviations()
    for page in options.pages or [""]:
        for path in sorted((RESULTS / page).rglob("variants.csv")):
            sentences += deviations(path.parent)
        for path in sorted((RESULTS / page).rglob(records.FILE)):
            sentences += records.deviations(path.parent)
    print(*sentences, f"{len(sentences)} numbers deviate", sep="\n")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
