"""The verb `replay`: one step of a run made again, and its page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pretrain.replay.prepare import Past
    from pretrain.study.report import Block, Document

SHOWN, LETTERS = 10, 70
"""Documents, and letters of each, on the terminal; the page has all of them whole."""


def replay(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Another layout, such as parallel.tensor_model_parallel_size=1.",
            metavar="[section.key=value]...",
        ),
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="The step to make again.")] = 1,
    local_ranks: Annotated[int, typer.Option(min=0, help="Ranks on this machine; 0: as the run had.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for report.md and replay.json.")] = Path("replay"),
) -> None:
    """Make one step of a run again from the nearest checkpoint; show its documents, losses and gradients.

    Example: python -m pretrain replay demo/runs/orthogonal --step 123
    """
    from shutil import get_terminal_size

    from rich.console import Console

    from pretrain.replay.prepare import look_up, replayed
    from pretrain.study.report import finish

    past = look_up(run, step)
    with replayed(past, overrides or (), local_ranks) as (_, answer):
        console = Console(width=max(120, get_terminal_size().columns))
        finish(_document(past, answer, bool(overrides or local_ranks)), out, console)


def agreement(record: Mapping[str, Any], loss: float, norm: float) -> str:
    """Return how a replayed step's loss and gradient norm stand to its record."""
    from pretrain.runs.tags import GRADIENT_NORM, LOSS

    then = [float(record.get(metric.tag) or "nan") for metric in (LOSS, GRADIENT_NORM)]
    if math.isnan(sum(then)):
        return "without a finite record of the step"
    if then == [loss, norm]:
        return "bit-equal to the record"
    apart = max(abs(now - was) / abs(was) for now, was in zip((loss, norm), then, strict=True))
    return f"within {apart:.1e} of the record (loss {then[0]!r}, gradient norm {then[1]!r})"


def _document(past: Past, answer: Mapping[str, Any], another_layout: bool) -> Document:
    from pretrain.reporting.tables import Table
    from pretrain.study.report import Document

    _, loss, norm = answer["trace"][-1]
    begins = answer["begins_after"]
    origin = f"from the checkpoint of step {begins}" if begins else "from the run's start"
    layout = "another layout than the run's" if another_layout else "the run's own layout"
    head = (
        f"Step {past.step} of {past.run.path}: loss {loss!r}, gradient norm {norm!r}; "
        f"{agreement(past.record, loss, norm)} ({origin}, {layout})."
    )
    rows, whole = [], []
    for rank, entry in enumerate(answer["documents"], start=1):
        per_token = entry["loss"] / max(1, entry["tokens"])
        cells = (
            str(rank),
            entry["document"],
            str(entry["tokens"]),
            f"{per_token:.3f}",
            f"{100 * entry['share']:.2f} %",
        )
        text = re.sub(r"\s+", " ", entry["text"])
        rows.append((*cells, text[:LETTERS] + ("…" if len(text) > LETTERS else "")))
        samples = ", ".join(map(str, entry["samples"]))
        whole += [
            f"### {rank}. {entry['document']} ({cells[4]} of the loss, sample {samples})",
            "\n".join(f"    {line}" for line in entry["text"].splitlines()),
        ]
    header = ("", "document", "tokens", "loss a token", "share of the loss", "text")
    parts = layer_norms(answer["gradient_norms"]).items()
    cells_of = [(name, f"{own:.6g}", f"{100 * (own / norm) ** 2:.1f} %") for name, own in parts]
    layers = Table(("part", "gradient norm", "share of its square"), cells_of)
    left = f"{len(rows) - SHOWN} more documents are on the page." if len(rows) > SHOWN else ""
    summary = (head, Table(header, rows[:SHOWN], (1, 5)), left, layers)
    page: list[Block] = [
        f"# Replay of step {past.step}",
        head,
        "## Gradient norm by part",
        layers,
        "## Documents by their share",
        Table(header[:-1], [row[:-1] for row in rows], (1,)),
        "## Their text in the batch",
        *whole,
    ]
    content = {"run": str(past.run.path), "step": past.step, "recorded": dict(past.record), **answer}
    return Document(page, content, summary, content_file="replay.json")


def layer_norms(norms: Mapping[str, float]) -> dict[str, float]:
    """Return {part of the model: norm of its gradient}, in the order of the forward pass."""
    squares: dict[str, float] = {}
    for name in sorted(norms, key=forward_order):
        layer = re.search(r"layers\.(\d+)\.", name)
        part = f"layer {layer[1]}" if layer else name.rpartition(".")[0] or name
        squares[part] = squares.get(part, 0.0) + norms[name] ** 2
    return {part: math.sqrt(square) for part, square in squares.items()}


def forward_order(name: str) -> tuple[int, int, str]:
    """Return a key that sorts parameters as the forward pass comes to them: embedding, layers, the rest."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return (0 if "embedding" in name else 1 if layer else 2, int(layer[1]) if layer else 0, name)
