"""Tables of text cells, shown in Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.table import Table as RichTable
from rich.text import Text

from data_pipeline.io.words import shown

REMARKS = "what may be said"
"""Title of a last column of clauses; a page shows them as sentences below the table."""
R = TypeVar("R")
Record = TypeVar("Record", contravariant=True)


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        header: Titles of the columns.
        rows: As many cells each as `header`; a line break in a cell is for the terminal.
        text_columns: Numbers of the columns with words; the others hold numbers, flush right.
        title: Title, which the caller shows, not this module.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Collection[int] = (0,)
    title: str = ""


@dataclass(frozen=True)
class Column(Generic[Record]):
    """A column of a table that is made of records.

    Attributes:
        title: Cell in the header.
        cell: Returns the text of a record.
        in_words: Whether the column holds words, flush left.
    """

    title: str
    cell: Callable[[Record], str]
    in_words: bool = False


def table_of(records: Iterable[R], columns: Sequence[Column[R]], title: str = "") -> Table:
    """Return a table with one row per record."""
    words = [index for index, column in enumerate(columns) if column.in_words]
    rows = [tuple(column.cell(record) for column in columns) for record in records]
    return Table(tuple(column.title for column in columns), rows, words, title)


def markdown(table: Table) -> list[str]:
    """Return the table's lines in Markdown, without its title."""
    rule = ["---" if index in table.text_columns else "---:" for index in range(len(table.header))]
    rows = [table.header, rule, *table.rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def rich_table(table: Table, *, between_rows: bool = False, bare: bool = False) -> RichTable:
    """Return the table for a rich console, without its title; cells are shown without markup.

    Args:
        between_rows: Whether to draw a line between any two rows.
        bare: Whether to draw no lines at all.
    """
    lines: dict[str, Any] = (
        {"box": None} if bare else {"show_lines": between_rows, "show_edge": False}
    )
    drawn = RichTable(pad_edge=False, **lines)
    for index, title in enumerate(table.header):
        drawn.add_column(
            Text(shown(title)),
            justify="left" if index in table.text_columns else "right",
            no_wrap=index not in table.text_columns,  # a broken number is another number
            overflow="fold",
        )
    for row in table.rows:
        drawn.add_row(*(Text(shown(cell)) for cell in row))
    return drawn
