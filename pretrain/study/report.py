"""Report of one study: report.md and .html for people, report.json for programs, plots, what is printed.

A `Document` is any of it; a `Report` is the form of the experiments, which say whether a criterion held.
"""

from __future__ import annotations

import pretrain.study.packages  # noqa: F401

# isort: split
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TypeAlias

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from pretrain.errors import UserError
from pretrain.reporting.html import html_list, html_page, html_table, html_text, inline_svg
from pretrain.reporting.plots import write_figures
from pretrain.reporting.tables import Table, markdown, rich_table
from pretrain.reporting.text import mean_sd, spread_of_all
from pretrain.runs.directory import write_json, write_text_atomically


@dataclass(frozen=True)
class Picture:
    """Link to a figure of the document, left out where the figure has nothing to show."""

    name: str


Block: TypeAlias = str | Table | Picture | Sequence[str]
"""Part of a page: a paragraph or heading, a table, a figure, or a list of sentences."""


@dataclass(frozen=True)
class Document:
    """Everything that a study writes and prints.

    Attributes:
        page, summary: the parts of report.md and report.html, and of what is printed on the terminal.
        content: the content of `content_file`; numbers that are not finite become null.
        figures: {file name without suffix: function that makes the figure, or None for nothing to show}.
        files: {file name: content}; None removes an older file of that name.
    """

    page: Sequence[Block]
    content: Mapping[str, Any]
    summary: Sequence[Block] = ()
    figures: Mapping[str, Callable[[], Figure | None]] = field(default_factory=dict)
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    content_file: str = "report.json"


@dataclass(frozen=True)
class Verdict:
    """Answer to whether the criterion held for one group of runs.

    It `held` in so many of the `n` runs (seeds), None where none could be tested; `numbers` is what was
    judged, as text.
    """

    group: str
    n: int
    held: int | None
    numbers: str

    @property
    def answer(self) -> str:
        """Return yes, no or in part, with the counts."""
        if self.held is None:
            return "not testable"
        word = "yes" if self.held == self.n else "no" if self.held == 0 else "in part"
        return f"{word} ({self.held} of {self.n})"


@dataclass(frozen=True)
class Report:
    """Outcome of one experiment. `captions`: {name of a figure: the sentence below it}."""

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

    def document(self) -> Document:
        """Return all forms of the report."""
        rows = [(v.group, str(v.n), v.numbers, v.answer) for v in self.verdicts]
        verdicts = text_table("", ("variant", "n", "measured", "criterion held"), rows)
        page: list[Block] = [
            f"# {self.title} ({self.experiment})",
            f"Criterion: {self.criterion}",
            verdicts,
        ]
        for name in self.figures:
            page += [Picture(name), self.captions.get(name, "")]
        for table in self.tables:
            page += [f"## {table.title}", table]
        content = {
            "experiment": self.experiment,
            "criterion": self.criterion,
            "verdicts": [asdict(verdict) | {"answer": verdict.answer} for verdict in self.verdicts],
            "notes": list(self.notes),
            **self.content,
        }
        summary = (f"{self.title}. Criterion: {self.criterion}", verdicts)
        return Document([*page, "## Notes", self.notes], content, summary, self.figures, self.files)


def write(study: Document | Report, out: Path) -> Path:
    """Write all files into `out` (made if missing) and return the path of report.md."""
    document = study.document() if isinstance(study, Report) else study
    out.mkdir(parents=True, exist_ok=True)
    drawings = write_figures(document.figures, out)
    for name, content in document.files.items():
        if content is None:
            (out / name).unlink(missing_ok=True)
        elif isinstance(content, str):
            write_text_atomically(out / name, content)
        else:
            (out / name).write_bytes(content)
    write_json(out / document.content_file, document.content)
    write_text_atomically(out / "report.html", page_html(document.page, drawings))
    write_text_atomically(out / "report.md", page_text(document.page, drawings))
    return out / "report.md"


def finish(study: Document | Report, out: Path, *, log_width: int = 80, remark: str = "") -> None:
    """Write all files, print the summary, and say where the report is, followed by `remark`.

    The summary is as wide as the terminal; without one, `log_width`. Raises UserError where `out` cannot be
    written.
    """
    document = study.document() if isinstance(study, Report) else study
    try:
        path = write(document, out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}") from error
    show(document.summary, Console(width=get_terminal_size((log_width, 24)).columns))
    typer.echo(f"written: {path}{remark}")


def show(blocks: Sequence[Block], console: Console, *, lines: bool = False) -> None:
    """Print parts of a page, without its figures; `lines`: between any two rows of a table."""
    for block in blocks:
        if isinstance(block, Table):
            console.print(rich_table(block, between_rows=lines), *([""] if lines else []), sep="\n")
        elif isinstance(block, str):
            console.print(Text(block))
        elif not isinstance(block, Picture):
            for sentence in block:
                console.print(Text(f"* {sentence}"))


def page_text(page: Sequence[Block], figures: Collection[str] | None = None) -> str:
    """Return the parts of a page as Markdown, with a blank line between; empty parts are left out.

    `figures` are the names of those that were drawn; None: all.
    """
    parts = []
    for block in page:
        if isinstance(block, Picture):
            there = figures is None or block.name in figures
            parts.append(f"![{block.name}]({block.name}.png)" if there else "")
        elif isinstance(block, Table):
            parts.append("\n".join(markdown(block)))
        elif isinstance(block, str):
            parts.append(block)
        else:
            parts.append("\n".join(f"* {sentence}" for sentence in block))
    return "\n\n".join(filter(None, parts)) + "\n"


def page_html(page: Sequence[Block], drawings: Mapping[str, str]) -> str:
    """Return the same parts as one file of HTML; `drawings` are {name: SVG} of what was drawn."""
    parts = []
    for block in page:
        if isinstance(block, Picture):
            parts.append(
                inline_svg(drawings[block.name], block.name) if block.name in drawings else ""
            )
        elif isinstance(block, Table):
            parts.append(html_table(block))
        else:
            parts.append(html_text(block) if isinstance(block, str) else html_list(block))
    title = next(
        (block.lstrip("# ") for block in page if isinstance(block, str) and block), "Report"
    )
    return html_page(title, "\n".join(filter(None, parts)))


def seeds_text(values: Sequence[float | None], digits: int = 3) -> str:
    """Return mean and deviation over seeds as text; a dash where a seed has no value."""
    return mean_sd(spread_of_all(values), digits)


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a titled table whose columns are all flush left."""
    return Table(header, rows, range(len(header)), title)
