"""Shows a Comparison: a table for the terminal, comparison.md for people, comparison.json for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pretrain.compare import ComparedRun, Comparison
from pretrain.run_directory import write_json, write_text_atomically

SIDE_BY_SIDE = 3

_TEXT_COLUMNS = ("run", "variant")

_Cells = Callable[[ComparedRun], str]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table with what it rests on above and what a reader must know below."""
    console.print(_title(comparison), markup=False, highlight=False)
    console.print(comparison_table(comparison))
    for note in footnotes(comparison):
        console.print(f"* {note}", markup=False, highlight=False)


def comparison_table(comparison: Comparison) -> Table:
    """A rich table; the second line of a cell is the gap to the baseline.

    A few runs stand side by side, which fits the 80 columns of a log file; more stand one below the other and
    need some 120 columns.
    """
    table = Table(show_lines=True)
    cells = [[cell(run).replace(" (", "\n(", 1) for _, cell in _COLUMNS] for run in comparison.runs]
    titles = [title for title, _ in _COLUMNS]
    rows = [titles, *cells]
    if len(comparison.runs) <= SIDE_BY_SIDE:
        rows = [list(row) for row in zip(*rows, strict=True)]
    for index, title in enumerate(rows[0]):
        table.add_column(
            title, justify="left" if index == 0 or title in _TEXT_COLUMNS else "right", overflow="fold"
        )
    for row in rows[1:]:
        table.add_row(*row)
    return table


def comparison_markdown(comparison: Comparison) -> str:
    """The same table in Markdown, with perplexity by source below and the notes in full."""
    lines = ["# Comparison of runs", "", _title(comparison), ""]
    lines += _markdown_table(
        [title for title, _ in _COLUMNS], [[cell(run) for _, cell in _COLUMNS] for run in comparison.runs]
    )
    sources = sorted(comparison.runs[0].perplexity_by_source)
    if len(sources) > 1:
        rows = [
            [run.name, *(_number(run.perplexity_by_source[source], 2) for source in sources)]
            for run in comparison.runs
        ]
        lines += ["", "Validation perplexity by source:", "", *_markdown_table(["run", *sources], rows)]
    lines += ["", *(f"* {note}" for note in footnotes(comparison)), ""]
    return "\n".join(lines)


def footnotes(comparison: Comparison) -> list[str]:
    """What a reader of the table must know, one sentence each."""
    return [
        f"Unigram perplexity of the validation text, what a model without context would reach: "
        f"{comparison.unigram_perplexity:,.2f}.",
        f"In parentheses: the difference to {comparison.baseline}.",
        "Tokens/s is the median over the steps after the first 10 %. Runs made one after the other share a "
        "machine with different company: benchmarks/step_time.py measures a ratio side by side.",
        "Gradient and optimizer bytes are sums over all ranks.",
        *comparison.notes,
    ]


def write_comparison(comparison: Comparison, out: Path) -> tuple[Path, Path]:
    """Write comparison.json and comparison.md into `out` (made if missing), each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    content = asdict(comparison)
    for row in content["runs"]:
        row["path"] = str(row["path"])
    json_path, markdown_path = out / "comparison.json", out / "comparison.md"
    write_json(json_path, content)
    write_text_atomically(markdown_path, comparison_markdown(comparison))
    return json_path, markdown_path


def _title(comparison: Comparison) -> str:
    return (
        f"Baseline: {comparison.baseline}. Each run trained on {comparison.tokens:,} tokens "
        f"in sequences of {comparison.sequence_length}."
    )


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [
        "| " + " | ".join(header) + " |",
        "| " + " | ".join("---" if title in _TEXT_COLUMNS else "---:" for title in header) + " |",
    ]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _number(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:,.{digits}f}"


def _with_gap(text: str, run: ComparedRun, field: str) -> str:
    gap = run.gaps[field]
    return text if not gap else f"{text} ({100 * gap:+.1f} %)"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


_COLUMNS: tuple[tuple[str, _Cells], ...] = (
    ("run", lambda run: run.name),
    ("variant", lambda run: run.variant),
    (
        "validation perplexity",
        lambda run: _with_gap(_number(run.validation_perplexity, 2), run, "validation_perplexity"),
    ),
    ("perplexity / unigram", lambda run: _number(run.perplexity_over_unigram, 3)),
    ("tokens/s", lambda run: _with_gap(_number(run.tokens_per_second, 0), run, "tokens_per_second")),
    (
        "trainable parameters",
        lambda run: _with_gap(f"{run.trainable_parameters:,}", run, "trainable_parameters"),
    ),
    ("frozen parameters", lambda run: _with_gap(f"{run.frozen_parameters:,}", run, "frozen_parameters")),
    (
        "gradients + optimizer state",
        lambda run: _with_gap(_bytes(run.gradient_and_optimizer_bytes), run, "gradient_and_optimizer_bytes"),
    ),
    ("checkpoint", lambda run: _with_gap(_bytes(run.checkpoint_bytes), run, "checkpoint_bytes")),
)
