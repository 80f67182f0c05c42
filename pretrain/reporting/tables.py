"""Table of text cells, shown in Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """Table whose `rows` have as many cells as `header`; a line break in a cell is for the terminal.

    `text_columns` are the numbers of those with words; the others hold numbers and are set flush right.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Collection[int] = (0,)
    title: str = ""


def markdown(table: Table) -> list[str]:
    """Return the table's lines in Markdown, without its title."""
    rule = ["---" if index in table.text_columns else "---:" for index in range(len(table.header))]
    rows = [table.header, rule, *table.rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def rich_table(table: Table, *, between_rows: bool = False, bare: bool = False) -> RichTable:
    """Return the table for a rich console, without its title; cells are shown without markup.

    `between_rows`: a line between any two rows; `bare`: no lines at all.
    """
    lines: dict[str, Any] = (
        {"box": None} if bare else {"show_lines": between_rows, "show_edge": False}
    )
    shown = RichTable(pad_edge=False, **lines)
    for index, title in enumerate(table.header):
        shown.add_column(
            title,
            justify="left" if index in table.text_columns else "right",
            no_wrap=index not in table.text_columns,  # a broken number is another number
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
