"""The form all evaluations share: OUT/report.md for people, OUT/report.json for programs, OUT/*.png."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pretrain.reporting.content import strict_json
from pretrain.reporting.plots import write_figures
from pretrain.reporting.statistics import spread_of_all
from pretrain.reporting.tables import Table, markdown, rich_table
from pretrain.reporting.text import mean_sd
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
class Report:
    """One experiment's outcome.

    Attributes:
        criterion: what has to hold for the hypothesis, as numbers, one sentence.
        content: the measurements, as JSON.
        figures: {file name without suffix: what makes the figure}
        captions: {name of a figure: the sentence below it}
        files: {file name: its content}; where there is None, an older file of that name is removed.
        notes: what a reader must know, one sentence each.
    """

    experiment: str
    title: str
    criterion: str
    verdicts: Sequence[Verdict]
    tables: Sequence[Table]
    notes: Sequence[str]
    content: Mapping[str, Any]
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    captions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes | None] = field(default_factory=dict)


def write_report(report: Report, out: Path) -> Path:
    """Write all forms into `out` (made if missing); returns the path of report.md."""
    out.mkdir(parents=True, exist_ok=True)
    write_figures(report.figures, out)
    for name, content in report.files.items():
        if content is None:
            (out / name).unlink(missing_ok=True)
        else:
            (out / name).write_bytes(content)
    verdicts = [asdict(verdict) | {"answer": verdict.answer} for verdict in report.verdicts]
    head = {"experiment": report.experiment, "criterion": report.criterion, "verdicts": verdicts}
    write_json(out / "report.json", strict_json({**head, "notes": list(report.notes), **report.content}))
    write_text_atomically(out / "report.md", report_markdown(report))
    return out / "report.md"


def report_markdown(report: Report) -> str:
    """The report as Markdown; the figures are beside it."""
    lines = [f"# {report.title} ({report.experiment})", "", f"Criterion: {report.criterion}", ""]
    lines += markdown(_verdict_table(report))
    for name in report.figures:
        lines += ["", f"![{name}]({name}.png)"]
        if name in report.captions:
            lines += ["", report.captions[name]]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", *markdown(table)]
    lines += ["", "## Notes", "", *(f"* {note}" for note in report.notes), ""]
    return "\n".join(lines)


def print_report(report: Report, console: Console) -> None:
    """The criterion and whether it held."""
    console.print(f"{report.title}. Criterion: {report.criterion}", markup=False, highlight=False)
    console.print(rich_table(_verdict_table(report)))


def seeds_text(values: Sequence[float | None], digits: int = 3) -> str:
    """Mean and deviation over seeds as text; a dash where a seed has no value."""
    return mean_sd(spread_of_all(values), digits)


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A titled table whose columns are all flush left."""
    return Table(header, rows, range(len(header)), title)


def _verdict_table(report: Report) -> Table:
    rows = [(v.group, str(v.n), v.numbers, v.answer) for v in report.verdicts]
    return text_table("", ("variant", "n", "measured", "criterion held"), rows)
