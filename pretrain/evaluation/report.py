"""The form all evaluations share: OUT/report.md for people, OUT/report.json for programs, OUT/*.png."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as RichTable

from pretrain.runs.directory import write_json, write_text_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Verdict:
    """Whether the criterion held for one group of runs.

    Attributes:
        held: in how many of the `n` runs (seeds) it held; None where it could not be tested.
        numbers: what was judged, as text.
    """

    group: str
    n: int
    held: int | None
    numbers: str

    @property
    def answer(self) -> str:
        if self.held is None:
            return "not testable"
        word = "yes" if self.held == self.n else "no" if self.held == 0 else "in part"
        return f"{word} ({self.held} of {self.n})"


@dataclass(frozen=True)
class Table:
    """A titled table of text cells; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    """One experiment's outcome.

    Attributes:
        criterion: what has to hold for the hypothesis, as numbers, one sentence.
        content: the measurements, as JSON.
        figures: {file name without suffix: figure}
        notes: what a reader must know, one sentence each.
    """

    experiment: str
    title: str
    criterion: str
    verdicts: Sequence[Verdict]
    tables: Sequence[Table]
    notes: Sequence[str]
    content: Mapping[str, Any]
    figures: Mapping[str, Figure] = field(default_factory=dict)


def write_report(report: Report, out: Path) -> Path:
    """Write the three forms into `out` (made if missing); returns the path of report.md."""
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in report.figures.items():
        figure.savefig(out / f"{name}.png", metadata={"Software": None})  # the same bytes again
    verdicts = [asdict(verdict) | {"answer": verdict.answer} for verdict in report.verdicts]
    head = {"experiment": report.experiment, "criterion": report.criterion, "verdicts": verdicts}
    write_json(out / "report.json", _finite({**head, "notes": list(report.notes), **report.content}))
    write_text_atomically(out / "report.md", markdown(report))
    return out / "report.md"


def markdown(report: Report) -> str:
    """The report as Markdown; the figures are beside it."""
    lines = [f"# {report.title} ({report.experiment})", "", f"Criterion: {report.criterion}", ""]
    lines += _markdown_table(_verdict_table(report))
    for name in report.figures:
        lines += ["", f"![{name}]({name}.png)"]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", *_markdown_table(table)]
    lines += ["", "## Notes", "", *(f"* {note}" for note in report.notes), ""]
    return "\n".join(lines)


def print_report(report: Report, console: Console) -> None:
    """The criterion and whether it held."""
    console.print(f"{report.title}. Criterion: {report.criterion}", markup=False, highlight=False)
    shown = _verdict_table(report)
    table = RichTable()
    for title in shown.header:
        table.add_column(title, overflow="fold")
    for row in shown.rows:
        table.add_row(*row)
    console.print(table)


def mean_sd(values: Sequence[float | None], digits: int = 3) -> str:
    """`mean ± standard deviation` (of the sample, n − 1); of one value just that; – of none."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "–"
    mean = f"{round(statistics.mean(known), digits) + 0.0:.{digits}f}"  # no -0.0
    return mean if len(known) == 1 else f"{mean} ± {statistics.stdev(known):.{digits}f}"


def _verdict_table(report: Report) -> Table:
    rows = [(v.group, str(v.n), v.numbers, v.answer) for v in report.verdicts]
    return Table("", ("variant", "n", "measured", "criterion held"), rows)


def _markdown_table(table: Table) -> list[str]:
    rows = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (table.header, *table.rows)]
    rule = " | ".join("---" for _ in table.header)
    return [f"| {row} |" for row in (rows[0], rule, *rows[1:])]


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
