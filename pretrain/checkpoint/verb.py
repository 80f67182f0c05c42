"""The commands `python -m pretrain checkpoint list` and `verify`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pretrain.checkpoint.listing import Listed

MIN_WIDTH = 120
"""Columns of a table outside a terminal, so that a log does not fold the table at 80."""

checkpoint = typer.Typer(
    no_args_is_help=True, help="List or verify the checkpoints of a run; starts no ranks."
)

RunArgument = Annotated[
    Path, typer.Argument(help="Run directory, such as runs/demo.", metavar="RUN")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@checkpoint.command("list")
def list_(run: RunArgument, as_json: JsonOption = False) -> None:
    """List every checkpoint: step, tokens, size, layout it was written by, age, good or not.

    Good: a loss of its weights was finite. Files are checked by their sizes; `verify` reads them.

    Example: python -m pretrain checkpoint list runs/demo
    """
    from pretrain.checkpoint.listing import list_checkpoints

    checkpoints = list_checkpoints(run)
    if as_json:
        _print_json(checkpoints)
        return
    if not checkpoints:
        typer.echo(f"{run} has no checkpoint yet")
        return
    _print_table(checkpoints)
    for entry in checkpoints:
        if entry.belongs_to_run:
            for problem in entry.problems:
                typer.echo(problem)


@checkpoint.command()
def verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Read every file of every complete checkpoint and compare its SHA-256.

    Exit code 0: all are whole; 1: a file is damaged or missing (each is named), COMPLETE among
    them.

    Example: python -m pretrain checkpoint verify runs/demo
    """
    from pretrain.checkpoint.listing import list_checkpoints, verified
    from pretrain.reporting.text import byte_count

    say = partial(typer.echo, err=True)
    listed = [entry for entry in list_checkpoints(run) if entry.belongs_to_run]
    judged = [result for entry in listed if (result := verified(entry, say)) is not None]
    if as_json:
        _print_json(judged)
    else:
        for entry in judged:
            size = byte_count(sum(file.bytes for file in entry.files.values()))
            verdict = "damaged" if entry.problems else f"whole, {entry.state.value}"
            typer.echo(f"{entry.path.name}: {len(entry.files)} files, {size}: {verdict}")
            for problem in entry.problems:
                typer.echo(f"  {problem}")
        if not judged:
            typer.echo(f"{run} has no complete checkpoint")
    raise typer.Exit(1 if any(entry.problems for entry in judged) else 0)


def _print_json(checkpoints: Sequence[Listed]) -> None:
    typer.echo(json.dumps([entry.as_json(time.time()) for entry in checkpoints], indent=1))


def _print_table(checkpoints: Sequence[Listed]) -> None:
    from shutil import get_terminal_size

    from rich.console import Console

    from pretrain.checkpoint.listing import age_text, layout_text
    from pretrain.reporting.tables import Table, rich_table
    from pretrain.reporting.text import NOTHING, byte_count

    rows = []
    for entry in checkpoints:
        tokens = f"{entry.about.position.consumed_tokens:,}" if entry.about else NOTHING
        layout = layout_text(entry.about.layout) if entry.about else NOTHING
        age = age_text(time.time() - entry.saved)
        rows.append(
            (entry.path.name, tokens, byte_count(entry.bytes), layout, age, entry.state.value)
        )
    header = ("checkpoint", "tokens", "size", "written by", "age", "state")
    table = rich_table(Table(header, rows, text_columns=(0, 3, 5)), bare=True)
    width = get_terminal_size((MIN_WIDTH, 24)).columns
    width = width if sys.stdout.isatty() else max(MIN_WIDTH, width)
    Console(width=width, highlight=False, markup=False).print(table)
