"""Runs of a ladder: their cells, what was predicted of them under seal, report and figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from megatron_patches.recipe.counting import count_parameters
from pretrain.compare.comparability import refuse_incomparable
from pretrain.compare.ladder import Cell, Ladder
from pretrain.config.load import parse_config
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.reporting.plots import COLOURS, MARKERS, label, legend_below, new_figure
from pretrain.reporting.tables import Table
from pretrain.reporting.text import number
from pretrain.runs.directory import RunDirectory
from pretrain.runs.finished import FinishedRun
from pretrain.study.report import Block, Document, Picture
from pretrain.study.seal import Seal, SealsRead, read_seals
from pretrain.study.sealed import Prediction, arm_of, design_of
from pretrain.study.verdict import measure_changes, statement

_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "head_dim")
_VARIED = dict.fromkeys(("tokens", *(f"model.{key}" for key in (*_SHAPE, "ffn_hidden_size"))))
"""Facts in which the runs of a ladder may differ."""
_HEADER = ("design", "parameters", "tokens", "predicted [90 %]", "observed", "outcome")
UNSEALED = "unsealed"
"""Outcome of a prediction whose seal or runs are not as they were sealed."""
LEFT_OUT = "left out"
"""Outcome of a prediction whose runs are finished beside the seal, but were not given."""


def sealed_predictions(runs: Sequence[FinishedRun]) -> SealsRead:
    """Return the seals with predictions beside the runs of a ladder.

    Raises:
        UserError: the runs differ in more than size, length and method.
    """
    refuse_incomparable(runs, _VARIED, match="")
    read = read_seals(run.path.resolve().parent for run in runs)
    return replace(read, seals=tuple(seal for seal in read.seals if seal.sealed.predictions))


def predicted_runs(seals: Sequence[Seal], runs: Sequence[FinishedRun]) -> set[Path]:
    """Return the paths of the runs of predicted cells, those that are not sealed too.

    Args:
        seals: of predictions.
        runs: any finished runs.
    """
    found: set[Path] = set()
    for seal in seals:
        found |= {run.path for of in seal.own_runs(runs).values() for run in of.values()}
        found |= {run.path for run in seal.strangers(runs, seal.sealed.settings)}
    return found


def cells_of(runs: Sequence[FinishedRun], ahead: Sequence[Config], baseline: str) -> list[Cell]:
    """Return the cells of finished runs, and of those ahead.

    Args:
        runs: finished runs.
        ahead: configurations of runs to come, whose losses are NaN.
        baseline: the arm whose parameters at a shape are the size of all cells of that shape.

    Raises:
        UserError: an arm has no finished run, a loss is not finite, or a cell has two runs of one
            seed.
    """
    known = [(parse_config(run.config), run.result.validation_loss) for run in runs]
    arms = {arm_of(config.run.name): config for config, _ in known}
    if lacking := {baseline, *(arm_of(config.run.name) for config in ahead)} - arms.keys():
        raise UserError(
            f"no finished run is of the variant {min(lacking)}; they are of "
            f"{', '.join(sorted(arms))}"
        )
    cells: dict[tuple[Any, ...], Cell] = {}
    for config, loss in (*known, *((config, math.nan) for config in ahead)):
        shaped = parse_config({**arms[baseline].as_dict(), "model": config.as_dict()["model"]})
        size = count_parameters(shaped.shape, shaped.policy).total
        design = design_of(config.run.name, config.run.seed)
        tokens = config.total_steps * config.tokens_per_step
        key = (arm_of(config.run.name), size, tokens, loss is not None and math.isnan(loss))
        cell = cells.setdefault(key, Cell(design, size, tokens, losses={}))
        why = "its loss is not finite" if loss is None else ""
        if config.run.seed in cell.losses:
            why = "another has its variant, size, length and seed"
        if loss is None or why:
            raise UserError(f"run {config.run.name} cannot be used, {why}; leave it out")
        cell.losses[config.run.seed] = loss
    return [*cells.values()]


def ladder_document(
    ladder: Ladder,
    seals: Sequence[Seal],
    runs: Sequence[FinishedRun],
    problems: Sequence[str] = (),
) -> Document:
    """Return law, factors and sealed predictions as page, JSON, figure and summary.

    Args:
        ladder: the fitted law.
        seals: of predictions.
        runs: every finished run, which the predictions are judged by.
        problems: sentences on seals that cannot be read.
    """
    judged = [_judge(seal, runs) for seal in seals]
    rows = [row for of_seal, _ in judged for row in of_seal]
    statements = [*(said for _, said in judged), *_strangers(seals, runs), *problems]
    blocks: list[Block] = [_law_sentence(ladder), _needs(ladder)]
    sealed: list[Block] = []
    if rows:
        count = Counter(row["outcome"] for row in rows)
        unsealed = f", {count[UNSEALED]} unsealed" if count[UNSEALED] else ""
        left_out = f", {count[LEFT_OUT]} left out" if count[LEFT_OUT] else ""
        score = (
            f"{count['inside']} of {count['inside'] + count['OUTSIDE'] + count[LEFT_OUT]} sealed "
            f"predictions inside, {count['to come']} to come{left_out}{unsealed}."
        )
        sealed = [Table(_HEADER, list(map(_cells, rows)), text_columns=(0, 5)), score]
    if statements:
        sealed.append(statements)
    return Document(
        page=["# Ladder", *blocks, Picture("ladder"), *sealed],
        content={
            "values": ladder.values,
            "factors": ladder.factors,
            "predictions": rows,
            "seals": statements,
            "cells": [asdict(cell) for cell in ladder.cells],
        },
        summary=[*blocks, *sealed],
        figures={"ladder": lambda: ladder_figure(ladder, rows)},
        content_file="ladder.json",
    )


def _law_sentence(ladder: Ladder) -> str:
    values = ", ".join(
        f"{name} = {value:.4g} [{low:.4g}, {high:.4g}]"
        for name, (value, low, high) in ladder.values.items()
    )
    off = max(abs(cell.loss - ladder.loss(cell.arm, *cell.place)) for cell in ladder.cells)
    return (
        f"L(N, D) = E + A / N^a + B / (k D)^b with {values} (95 % intervals), N the parameters of "
        f"{next(iter(ladder.factors))} and D the training tokens. The {len(ladder.cells)} cells "
        f"are at most {off:.4f} nats off."
    )


def _needs(ladder: Ladder) -> list[str]:
    """Return for each arm but the baseline how many of the baseline's tokens it needs."""
    baseline, *others = ladder.factors
    needs = []
    for arm in others:
        middle, high, low = (1 / k for k in ladder.factors[arm])
        share = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
        needs.append(f"{arm} needs {share} times the tokens of {baseline} (1 / k).")
    return needs


def _judge(seal: Seal, runs: Sequence[FinishedRun]) -> tuple[list[dict[str, Any]], str]:
    """Return the predictions of a seal with what was observed, and the sentence on the seal."""
    own = seal.own_runs(runs)
    of_all = measure_changes(seal)
    found = list(of_all)
    rows = []
    for prediction in seal.sealed.predictions:
        design = prediction.design
        sealed = {seed: own[design][seed] for seed in prediction.seeds if seed in own[design]}
        changes = [c for run in sealed.values() for c in seal.changes_of(run, design)]
        found += changes
        row = _judged(prediction, [*sealed.values()], unsealed=bool(of_all or changes))
        not_given = [
            RunDirectory(seal.place / f"{design}-seed_{seed}")
            for seed in prediction.seeds
            if seed not in sealed
        ]
        if not_given and all(run.is_finished() for run in not_given):
            row["outcome"] = LEFT_OUT
        rows.append(row)
    return rows, statement(seal, own, found)


def _judged(prediction: Prediction, runs: Sequence[FinishedRun], unsealed: bool) -> dict[str, Any]:
    """Return a prediction with what was observed, once the runs of all its seeds are finished."""
    row = prediction.model_dump() | {"observed": None, "outcome": "to come"}
    if len(runs) == len(prediction.seeds):
        observed = float(np.mean([run.result.validation_loss or math.inf for run in runs]))
        inside = prediction.low <= observed <= prediction.high
        outcome = "inside" if inside else "OUTSIDE"
        row |= {"observed": observed, "outcome": UNSEALED if unsealed else outcome}
    return row


def _strangers(seals: Sequence[Seal], runs: Sequence[FinishedRun]) -> list[str]:
    """Return a sentence on runs of predicted cells that are not sealed, if there are any."""
    sealed = [of_design for seal in seals for of_design in seal.own_runs(runs).values()]
    own = {run.path for of_design in sealed for run in of_design.values()}
    found = [run for seal in seals for run in seal.strangers(runs, seal.sealed.settings)]
    names = sorted({run.name for run in found if run.path not in own})
    said = f"Of predicted cells, but not sealed, and so not judged: {', '.join(names)}."
    return [said] if names else []


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    size, tokens = (f"{row[key]:,}" for key in ("parameters", "tokens"))
    expected = "{loss:.4f} [{low:.4f}, {high:.4f}]".format(**row)
    return row["design"], size, tokens, expected, number(row["observed"]), row["outcome"]


def ladder_figure(ladder: Ladder, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw loss over tokens for each arm: cells, the law at each size, sealed predictions.

    Args:
        ladder: the fitted law.
        rows: predictions and what was observed, as in ladder.json.
    """
    figure, axes = new_figure(-(-len(ladder.factors) // 3), min(3, len(ladder.factors)), 3.6)
    arms = [arm_of(row["design"]) for row in rows]
    sizes = sorted({cell.parameters for cell in ladder.cells} | {row["parameters"] for row in rows})
    tokens = [cell.tokens for cell in ladder.cells] + [row["tokens"] for row in rows]
    lengths = np.geomspace(min(tokens), max(tokens), 60)
    for plot, arm in zip(axes, ladder.factors, strict=False):
        for look, size in enumerate(sizes):
            colour = COLOURS[look % len(COLOURS)]
            point: dict[str, Any] = {
                "color": colour,
                "marker": MARKERS[look % len(MARKERS)],
                "markersize": 5,
            }
            law = ladder.loss(arm, size, lengths)
            plot.plot(lengths, law, color=colour, label=f"{size:,} parameters")
            for cell in ladder.cells:
                if (cell.arm, cell.parameters) == (arm, size):
                    plot.plot([cell.tokens], [cell.loss], **point)
            for own, row in zip(arms, rows, strict=True):
                if (own, row["parameters"]) == (arm, size):
                    at = row["tokens"]
                    plot.plot([at, at], [row["low"], row["high"]], "_-", color=colour)
                    plot.plot([at], [row["observed"] or math.nan], mfc="white", **point)
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_formatter(EngFormatter(places=0))
        label(plot, arm, x="training tokens", y="validation loss, nats/token")
    legend_below(figure, axes[0])
    return figure
