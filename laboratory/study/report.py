"""Report of one study: page for people, JSON for programs, figures, and what is printed.

A `Document` is the report of any study; a `Report` is the form of the experiments, which say
whether a criterion held. A page is a sequence of blocks; a `Form` writes them as Markdown, as HTML
or on the terminal.
"""

from __future__ import annotations

import laboratory.study.packages  # noqa: F401

# isort: split
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Generic, TypeAlias, TypeVar

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from data_pipeline.io.files import write_json, write_text_atomically
from data_pipeline.io.words import shown, shown_in_line
from laboratory.reporting.html import html_list, html_page, html_table, html_text, inline_svg
from laboratory.reporting.plots import NARROW_NAME, write_figures
from pretrain.errors import UserError
from pretrain.reporting.tables import Table, markdown, rich_table
from pretrain.reporting.text import mean_sd, spread_of_all

T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """Figure of the document, left out where the figure has nothing to show."""

    name: str


Block: TypeAlias = str | Table | Picture | Sequence[str]
"""Part of a page: a paragraph or heading, a table, a figure, or a list of sentences."""


@dataclass(frozen=True)
class Form(Generic[T]):
    """One form of a page: how each kind of block is written.

    Attributes:
        text: Function that writes a paragraph or heading.
        table: Function that writes a table, without its title.
        picture: Function that writes the figure of that name.
        sentences: Function that writes a list of sentences.
    """

    text: Callable[[str], T]
    table: Callable[[Table], T]
    picture: Callable[[str], T]
    sentences: Callable[[Sequence[str]], T]

    def write(self, page: Sequence[Block]) -> Iterator[T]:
        """Yield the blocks of a page in this form, without empty ones."""
        for block in page:
            if isinstance(block, Picture):
                written = self.picture(block.name)
            elif isinstance(block, Table):
                written = self.table(block)
            elif isinstance(block, str):
                written = self.text(block)
            else:
                written = self.sentences(block)
            if written:
                yield written


@dataclass(frozen=True)
class Document:
    """Everything that a study writes and prints.

    Attributes:
        page: Blocks of report.md and report.html.
        content: The content of `content_file`; numbers that are not finite become null.
        summary: Blocks that are printed on the terminal.
        figures: {file name without suffix: function that draws it, or returns None for nothing}.
        content_file: Name of the JSON file.
    """

    page: Sequence[Block]
    content: Mapping[str, Any]
    summary: Sequence[Block] = ()
    figures: Mapping[str, Callable[[], Figure | None]] = field(default_factory=dict)
    content_file: str = "report.json"


@dataclass(frozen=True)
class Verdict:
    """Answer to whether the criterion held for one group of runs.

    Attributes:
        group: Name of the group.
        n: Number of runs (seeds).
        held: Number of runs in which the criterion held; None where none could be tested.
        numbers: Numbers that were judged, as text.
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
    """Outcome of one experiment.

    Attributes:
        experiment: Number of the experiment, such as E1.
        title: Subject of the experiment.
        criterion: Condition that was to hold.
        verdicts: Whether the criterion held, for each group.
        tables: Titled tables of the page.
        notes: Sentences at the end of the page.
        content: Further content of report.json.
        figures: {file name without suffix: function that draws it}.
    """

    experiment: str
    title: str
    criterion: str
    verdicts: Sequence[Verdict]
    tables: Sequence[Table]
    notes: Sequence[str]
    content: Mapping[str, Any]
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)

    def document(self) -> Document:
        """Return all forms of the report."""
        rows = [(v.group, str(v.n), v.numbers, v.answer) for v in self.verdicts]
        verdicts = text_table("", ("variant", "n", "measured", "criterion held"), rows)
        title = f"# {self.title} ({self.experiment})"
        page: list[Block] = [title, f"Criterion: {self.criterion}", verdicts]
        page += [Picture(name) for name in self.figures]
        for table in self.tables:
            page += [f"## {table.title}", table]
        content = {
            "experiment": self.experiment,
            "criterion": self.criterion,
            "verdicts": [asdict(verdict) | {"answer": verdict.answer} for verdict in self.verdicts],
            "notes": list(self.notes),
            **self.content,
        }
        return Document(
            page=[*page, "## Notes", self.notes],
            content=content,
            summary=(f"{self.title}. Criterion: {self.criterion}", verdicts),
            figures=self.figures,
        )


def write(document: Document, out: Path) -> Path:
    """Write all files of a study and return the path of report.md.

    Args:
        out: directory, made if missing.

    Raises:
        UserError: `out` cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawings = write_figures(document.figures, out)
        write_json(out / document.content_file, document.content)
        write_text_atomically(out / "report.html", shown(page_html(document.page, drawings)))
        write_text_atomically(out / "report.md", shown(page_text(document.page, drawings)))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}") from error
    return out / "report.md"


def finish(document: Document, out: Path, *, log_width: int = 80, remark: str = "") -> None:
    """Write all files, and print the summary and the path of the report.

    Args:
        out: Directory of the files.
        log_width: Characters of a line where there is no terminal.
        remark: Text after the last line.

    Raises:
        UserError: `out` cannot be written.
    """
    path = write(document, out)
    show(document.summary, Console(width=get_terminal_size((log_width, 24)).columns))
    typer.echo(f"written: {path}{remark}")


def show(blocks: Sequence[Block], console: Console, *, lines: bool = False) -> None:
    """Print blocks of a page, without its figures.

    Args:
        lines: Whether to draw a line between rows of a table, and leave one empty after it.
    """
    after_table = [""] if lines else []
    form: Form[Sequence[Text | RichTable | str]] = Form(
        text=lambda text: [Text(shown(text))],
        table=lambda table: [rich_table(table, between_rows=lines), *after_table],
        picture=lambda name: [],
        sentences=lambda sentences: [
            Text(f"* {shown_in_line(sentence)}") for sentence in sentences
        ],
    )
    for written in form.write(blocks):
        console.print(*written, sep="\n")


def page_text(page: Sequence[Block], figures: Collection[str] | None = None) -> str:
    """Return a page as Markdown, with a blank line between its blocks.

    Args:
        page: The blocks.
        figures: Names of the figures that were drawn; None: all.
    """
    form = Form(
        text=str,
        table=lambda table: "\n".join(markdown(table)),
        picture=lambda name: f"![{name}]({name}.png)" if figures is None or name in figures else "",
        sentences=lambda sentences: "\n".join(
            f"* {shown_in_line(sentence)}" for sentence in sentences
        ),
    )
    return "\n\n".join(form.write(page)) + "\n"


def page_html(page: Sequence[Block], drawings: Mapping[str, str]) -> str:
    """Return a page as one file of HTML.

    Args:
        page: The blocks; the first text is the title.
        drawings: {name: SVG} of the figures that were drawn, and of their narrow forms.
    """
    form = Form(
        text=html_text,
        table=html_table,
        picture=lambda name: (
            inline_svg(drawings[name], name, drawings.get(NARROW_NAME.format(name), ""))
            if name in drawings
            else ""
        ),
        sentences=html_list,
    )
    texts = (block.lstrip("# ") for block in page if isinstance(block, str) and block)
    return html_page(next(texts, "Report"), "\n".join(form.write(page)))


def seeds_text(values: Sequence[float | None], digits: int = 3) -> str:
    """Return mean and deviation over seeds as text; a dash where a seed has no value.

    Args:
        values: Values, one for each seed.
        digits: Digits after the point.
    """
    return mean_sd(spread_of_all(values), digits)


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose columns are all flush left.

    Args:
        header: Titles of the columns.
        rows: cells, as many in each row as `header` has.
    """
    return Table(header, rows, range(len(header)), title)
