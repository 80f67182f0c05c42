"""The report of E5 from its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pretrain.evaluation.heads.length import FACTORS, RunLengths
from pretrain.reporting.tables import Table
from pretrain.study.report import Report, Verdict, seeds_text, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BUCKETS = 12
OTHERS = tuple(factor for factor in FACTORS if factor != 1.0)


def length_report(runs: Sequence[RunLengths], tolerance: float) -> Report:
    """All runs in one report; runs of a group are seeds of one another.

    Args:
        tolerance: the largest relative change of perplexity that counts as stable.
    """
    by_group: dict[str, list[RunLengths]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    return Report(
        experiment="E5",
        title="Length generalisation",
        criterion=(
            "perplexity at half and at one and a half times the trained length differs from that at the "
            f"trained length by at most {100 * tolerance:g} %."
        ),
        verdicts=[_verdict(group, members, tolerance) for group, members in by_group.items()],
        tables=[_table(by_group), _gain_table(by_group)],
        notes=_notes(runs),
        content={"tolerance": tolerance, "runs": [_content(run) for run in runs]},
        figures={"length": lambda: _figure(by_group, tolerance)},
    )


def _verdict(group: str, runs: Sequence[RunLengths], tolerance: float) -> Verdict:
    parts = []
    for factor in OTHERS:
        changes = [run.change(factor) for run in runs]
        reason = runs[0].reasons.get(factor)
        measured = f"{seeds_text([None if c is None else 100 * c for c in changes], 1)} %"
        parts.append(f"at {100 * (factor - 1):+.0f} %: {'not possible, ' + reason if reason else measured}")
    known = [[change for factor in OTHERS if (change := run.change(factor)) is not None] for run in runs]
    held = sum(all(abs(change) <= tolerance for change in changes) for changes in known)
    possible = not runs[0].reasons
    # What cannot be measured cannot hold; what was measured can still have failed.
    answer = held if possible or held == 0 else None
    return Verdict(group, len(runs), answer, "; ".join(parts))


def _table(by_group: dict[str, list[RunLengths]]) -> Table:
    rows = []
    for group, runs in by_group.items():
        for factor in FACTORS:
            length = round(factor * runs[0].trained_length)
            reason = runs[0].reasons.get(factor)
            if reason:
                rows.append((group, str(len(runs)), str(length), f"not possible: {reason}", "–", "–"))
                continue
            perplexities: list[float | None] = [run.losses[factor].perplexity for run in runs]
            changes = [100 * (run.change(factor) or 0.0) for run in runs]
            cells = (
                seeds_text(perplexities, 2),
                seeds_text(changes, 1),
                f"{runs[0].losses[factor].predictions:,}",
            )
            rows.append((group, str(len(runs)), str(length), *cells))
    header = ("variant", "n", "length", "perplexity", "change, %", "predictions")
    return text_table("Perplexity by length, mean ± sd over seeds", header, rows)


def _gain_table(by_group: dict[str, list[RunLengths]]) -> Table:
    rows = []
    for group, runs in by_group.items():
        trained = runs[0].trained_length
        inside = seeds_text([float(run.gain()[trained // 2 : trained].mean()) for run in runs], 4)
        possible = 1.5 in runs[0].losses
        beyond = seeds_text([float(run.gain()[trained:].mean()) if possible else None for run in runs], 4)
        rows.append((group, str(len(runs)), inside, beyond))
    header = ("variant", "n", "positions T/2 to T", "positions T to 3T/2")
    return text_table("What context gives: change of loss against blocks of T/2, in nats", header, rows)


def _notes(runs: Sequence[RunLengths]) -> list[str]:
    notes = [
        "Every length is judged on the same predictions: spans of 3T + 1 held-out ids of each source are cut "
        "into 6 blocks of T/2, 3 of T and 2 of 3T/2 (T: the trained length).",
        "A prediction sees only its own block, so shorter blocks show less context on average: some rise of "
        "perplexity at half the length is the loss of context, not a failure to generalise.",
        "What context gives is the loss of predictions in long blocks minus that of the very same "
        "predictions in blocks of T/2; below 0, context helps. If it helps less beyond T than before, or "
        "hurts, then the model does not carry over to longer inputs. A model that makes nothing of its "
        "context shows 0 everywhere and is stable at any length, to no merit.",
    ]
    for reason in sorted({reason for run in runs for reason in run.reasons.values()}):
        who = sorted({run.group for run in runs if reason in run.reasons.values()})
        notes.append(f"Not possible at +50 % for {', '.join(who)}: {reason}.")
    return notes


def _content(run: RunLengths) -> dict[str, Any]:
    losses = {
        f"{factor:g}": {
            "length": loss.length,
            "loss": loss.loss,
            "perplexity": loss.perplexity,
            "change": run.change(factor),
            "predictions": loss.predictions,
            "loss_by_position": loss.by_position().tolist(),
        }
        for factor, loss in run.losses.items()
    }
    reasons = {f"{factor:g}": reason for factor, reason in run.reasons.items()}
    return {
        "name": run.name,
        "group": run.group,
        "seed": run.seed,
        "trained_length": run.trained_length,
        "lengths": losses,
        "gain_by_position": run.gain().tolist(),
        "not_possible": reasons,
    }


def _figure(by_group: dict[str, list[RunLengths]], tolerance: float) -> Figure:
    from pretrain.reporting.plots import label, legend_below, new_figure

    figure, (changes, positions) = new_figure(1, 2, height=3.6)
    _plot_changes(changes, by_group, tolerance)
    label(changes, "Change of perplexity", "length / trained length", "%")
    _plot_gain(positions, by_group)
    label(
        positions,
        "What context gives, against blocks of T/2",
        "position / trained length T",
        "change of loss, nats",
    )
    legend_below(figure, changes)
    return figure


def _plot_changes(plot: Axes, by_group: dict[str, list[RunLengths]], tolerance: float) -> None:
    from pretrain.reporting.plots import GREY, group_style

    plot.axhspan(-100 * tolerance, 100 * tolerance, color="#ececec", zorder=0)
    plot.annotate(
        f"criterion ±{100 * tolerance:g} %",
        (1, -100 * tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=GREY,
    )
    groups = list(by_group)
    for place, (group, runs) in enumerate(by_group.items()):
        colour, marker = group_style(groups, group)
        known = [factor for factor in FACTORS if factor in runs[0].losses]
        values = [[100 * (run.change(factor) or 0.0) for run in runs] for factor in known]
        means = [statistics.mean(found) for found in values]
        spread = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in values]
        shift = 0.02 * (place - (len(groups) - 1) / 2)  # so that error bars do not hide one another
        plot.errorbar(
            [factor + shift for factor in known],
            means,
            yerr=spread,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.4,
            capsize=2.5,
            label=group,
        )
    plot.set_xticks(FACTORS)


def _plot_gain(plot: Axes, by_group: dict[str, list[RunLengths]]) -> None:
    from pretrain.reporting.plots import GREY, group_style

    for group, runs in by_group.items():
        colour, marker = group_style(list(by_group), group)
        factor = max(runs[0].losses)
        trained = runs[0].trained_length
        length = runs[0].losses[factor].length
        edges = [length * index // _BUCKETS for index in range(_BUCKETS + 1)]
        middles, means = [], []
        for start, stop in pairwise(edges):
            if stop > start:
                middles.append((start + stop) / 2 / trained)
                found = [run.gain()[start:stop].mean() for run in runs]
                means.append(statistics.mean(found))
        plot.plot(middles, means, color=colour, marker=marker, markersize=3.5, linewidth=1.2)
    plot.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    plot.annotate(
        "trained length",
        (1.0, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -10),
        textcoords="offset points",
        fontsize=8,
        color=GREY,
    )
