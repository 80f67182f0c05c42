"""Runs of a ladder: their cells, what was predicted of them under seal, the report and its figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from megatron_patches.recipe.counting import count_parameters
from pretrain.compare.ladder import Cell, Ladder
from pretrain.config.load import parse_config
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.reporting.plots import COLOURS, MARKERS, label, legend_below, new_figure
from pretrain.reporting.tables import Table
from pretrain.reporting.text import number
from pretrain.runs.finished import FinishedRun
from pretrain.study.report import Document, Picture
from pretrain.study.seal import Seal, design_of

_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "head_dim")
VARIED = dict.fromkeys(("tokens", *(f"model.{key}" for key in (*_SHAPE, "ffn_hidden_size"))))
"""Facts in which the runs of a ladder may differ."""
_HEADER = ("design", "parameters", "tokens", "predicted [90 %]", "observed", "outcome")


def cells_of(runs: Sequence[FinishedRun], ahead: Sequence[Config], baseline: str) -> list[Cell]:
    """Return the cells of finished runs, and of those ahead; parameters are the baseline's at the same shape.

    Raises UserError: no finished run of an arm, a loss that is not finite, two runs of one seed in a cell.
    """
    known = [(parse_config(run.config), run.result.validation_loss) for run in runs]
    arms = {own.run.name.partition("-")[0]: own for own, _ in known}
    if lacking := {baseline, *(own.run.name.partition("-")[0] for own in ahead)} - arms.keys():
        raise UserError(
            f"no finished run is of the arm {min(lacking)}; they are of {', '.join(sorted(arms))}"
        )
    cells: dict[tuple[Any, ...], Cell] = {}
    for own, loss in (*known, *((own, math.nan) for own in ahead)):
        shaped = parse_config({**arms[baseline].as_dict(), "model": own.as_dict()["model"]})
        size = count_parameters(shaped.shape, shaped.policy).total
        cell = Cell(
            design_of(own.run.name, own.run.seed), size, own.total_steps * own.tokens_per_step, {}
        )
        cell = cells.setdefault((cell.arm, size, cell.tokens, str(loss) == "nan"), cell)
        if loss is None or own.run.seed in cell.losses:
            why = (
                "its loss is not finite"
                if loss is None
                else "another has its arm, size, length and seed"
            )
            raise UserError(f"run {own.run.name} cannot be used, {why}; leave it out")
        cell.losses[own.run.seed] = loss
    return [*cells.values()]


def ladder_document(ladder: Ladder, seals: Sequence[Seal], runs: Sequence[FinishedRun]) -> Document:
    """Return law, factors and sealed predictions, judged by the runs, as page, JSON, figure and summary."""
    baseline, *others = ladder.factors
    words = [
        "{} = {:.4g} [{:.4g}, {:.4g}]".format(name, *own) for name, own in ladder.values.items()
    ]
    off = max(
        abs(cell.loss - ladder.loss(cell.arm, cell.parameters, cell.tokens))
        for cell in ladder.cells
    )
    law = (
        f"L(N, D) = E + A / N^a + B / (k D)^b with {', '.join(words)} (95 % intervals), N the parameters of "
        f"{baseline} and D the training tokens. The {len(ladder.cells)} cells are at most {off:.4f} nats off."
    )
    needs, rows, table = [], list[dict[str, Any]](), list[tuple[str, ...]]()
    for arm in others:
        middle, high, low = (1 / k for k in ladder.factors[arm])
        needs.append(
            f"{arm} needs {middle:.3f} [{low:.3f}, {high:.3f}] times the tokens of {baseline} (1 / k)."
        )
    for seal, row in ((one, row) for one in seals for row in one.content["predictions"]):
        losses = [
            run.result.validation_loss or math.inf for run in seal.runs_of(row["design"], runs)
        ]
        observed = float(np.mean(losses)) if len(losses) == len(row["seeds"]) else None
        inside = "inside" if row["low"] <= (observed or 0.0) <= row["high"] else "OUTSIDE"
        rows.append(
            {**row, "observed": observed, "outcome": "to come" if observed is None else inside}
        )
        place = (row["design"], f"{row['parameters']:,}", f"{row['tokens']:,}")
        expected = "{loss:.4f} [{low:.4f}, {high:.4f}]".format(**row)
        table.append((*place, expected, number(observed), rows[-1]["outcome"]))
    count, statements = (
        [row["outcome"] for row in rows].count,
        [seal.statement(runs) for seal in seals],
    )
    judged = len(rows) - count("to come")
    score = f"{count('inside')} of {judged} sealed predictions inside, {count('to come')} to come."
    sealed = (Table(_HEADER, table, (0, 5)), score, statements) if rows else ()
    content = {
        "values": ladder.values,
        "factors": ladder.factors,
        "predictions": rows,
        "seals": statements,
    }
    content["cells"] = [asdict(cell) for cell in ladder.cells]
    figures = {"ladder": lambda: ladder_figure(ladder, rows)}
    page = ("# Ladder", law, needs, Picture("ladder"), *sealed)
    return Document(page, content, (law, needs, *sealed), figures, content_file="ladder.json")


def ladder_figure(ladder: Ladder, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw loss over tokens for each arm: cells, the law at each size, and what was predicted under seal."""
    figure, axes = new_figure(-(-len(ladder.factors) // 3), min(3, len(ladder.factors)), 3.6)
    places = [(cell.arm, cell.parameters, cell.tokens, [cell.loss]) for cell in ladder.cells]
    for row in rows:
        ends = [row["low"], row["high"], row["observed"] or math.nan]
        places.append((row["design"].partition("-")[0], row["parameters"], row["tokens"], ends))
    lengths = np.geomspace(min(at[2] for at in places), max(at[2] for at in places), 60)
    for plot, arm in zip(axes, ladder.factors, strict=False):
        for look, size in enumerate(sorted({at[1] for at in places})):
            colour, marker = COLOURS[look % len(COLOURS)], MARKERS[look % len(MARKERS)]
            plot.plot(
                lengths, ladder.loss(arm, size, lengths), color=colour, label=f"{size:,} parameters"
            )
            for _, _, tokens, (*ends, loss) in (at for at in places if at[:2] == (arm, size)):
                plot.plot([tokens] * len(ends), ends, "_-", color=colour)
                plot.plot(
                    [tokens], [loss], marker, color=colour, mfc="white" if ends else colour, ms=5
                )
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_formatter(EngFormatter(places=0))
        label(plot, arm, "training tokens", "validation loss, nats/token")
    legend_below(figure, axes[0])
    return figure
