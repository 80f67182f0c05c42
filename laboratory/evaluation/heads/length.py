"""Experiment E5: perplexity at other lengths than the one trained on, of the very same predictions.

A span of 3·T + 1 held-out ids (T: the trained length) is cut into 6 blocks of T/2, 3 of T and 2 of
3T/2: every length predicts the same 3·T tokens, each from what its own block has shown before.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_pipeline.shards.samples import ValidationSamples
from laboratory.evaluation.heads.trained_model import TrainedModel, losses_of
from laboratory.reporting.plots import (
    GREY,
    group_style,
    label,
    legend_below,
    new_figure,
    plot_seeds,
    remark,
)
from laboratory.study.report import Report, Verdict, seeds_text, text_table
from laboratory.study.seeds import by_group
from megatron_patches.attention.heads import has_queries_and_keys
from pretrain.errors import UserError
from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, perplexity

FACTORS = (0.5, 1.0, 1.5)
OTHERS = (0.5, 1.5)
_LENGTHS_PER_SPAN = 3
_BUCKETS = 12


@dataclass(frozen=True)
class LengthLoss:
    """Losses of one length, in nats, by place in a span.

    Attributes:
        length: Length of the blocks.
        sums: `[3 * trained length]` float64, losses summed over all spans. The same place is the
            same prediction at every length.
        counts: Numbers of predictions, of the same shape.
    """

    length: int
    sums: np.ndarray
    counts: np.ndarray

    @property
    def predictions(self) -> int:
        return round(self.counts.sum())

    @property
    def loss(self) -> float:
        """Return the mean over all predictions."""
        return float(self.sums.sum() / self.counts.sum())

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def by_position(self) -> np.ndarray:
        """Return the mean loss of the predictions made from i + 1 ids, `[length]`."""
        sums, counts = (part.reshape(-1, self.length).sum(0) for part in (self.sums, self.counts))
        return np.asarray(sums / np.maximum(counts, 1))


@dataclass(frozen=True)
class RunLengths:
    """Losses of one run at every length.

    Attributes:
        trained_length: data.sequence_length.
        losses: {factor: losses} of those of FACTORS that the model can read.
        not_longer: Reason why the model cannot read more than the trained length; None if it can.
    """

    name: str
    group: str
    seed: int
    trained_length: int
    losses: Mapping[float, LengthLoss]
    not_longer: str | None

    def change(self, factor: float) -> float:
        """Return the relative change of perplexity at `factor` times the trained length."""
        return perplexity(self.losses[factor].loss - self.losses[1.0].loss) - 1

    def gain(self) -> np.ndarray:
        """Return the change of loss by context, by position in the longest blocks, `[length]`.

        Negative is better.

        The loss in nats of every prediction minus the loss of the very same one in blocks of half
        the trained length T, whose boundaries are also boundaries of the longer blocks: so position
        i has seen i + 1 ids here and 1 + i mod T/2 there. 0 by construction up to T/2.
        """
        longest = self.losses[max(self.losses)]
        short = LengthLoss(longest.length, self.losses[0.5].sums, longest.counts)
        return longest.by_position() - short.by_position()


def measure_lengths(trained: TrainedModel, group: str, samples: int | None) -> RunLengths:
    """Return the losses at every length.

    Args:
        trained: The run's model, with its data.
        group: Name of the run's group.
        samples: Spans per source; None: as many as hold data.validation_samples samples.

    Raises:
        UserError: the trained length is odd.
        DataError: a source has fewer held-out tokens than one span.
    """
    length = trained.config.data.sequence_length
    if length % 2:
        raise UserError(
            f"{trained.run.path}: data.sequence_length={length} is odd, so that half of it is not "
            "a length; this evaluation needs an even one"
        )
    spans = samples or -(-trained.config.data.validation_samples // _LENGTHS_PER_SPAN)
    sources = trained.data.blend.validation_samples(_LENGTHS_PER_SPAN * length, spans)
    reason = why_not_longer(trained)
    possible = [factor for factor in FACTORS if factor <= 1 or reason is None]
    losses = {factor: _losses(trained, sources, round(factor * length)) for factor in possible}
    run = trained.run
    return RunLengths(run.name, group, run.seed, length, losses=losses, not_longer=reason)


def why_not_longer(trained: TrainedModel) -> str | None:
    """Return why the model cannot read more than its trained length; None if it can."""
    length = trained.config.data.sequence_length
    if trained.config.model.position_embedding == "learned":
        return f"there is no learned position beyond the {length} trained"
    if not all(
        has_queries_and_keys(layer.self_attention) for layer in trained.model.decoder.layers
    ):
        return f"the score matrices have rows for the {length} trained positions only"
    return None


def _losses(
    trained: TrainedModel, sources: Mapping[str, ValidationSamples], length: int
) -> LengthLoss:
    span = _LENGTHS_PER_SPAN * trained.config.data.sequence_length
    sums = np.zeros(span)
    counts = np.zeros(span)
    # As many ids as a training forward pass.
    at_once = max(1, trained.config.data.micro_batch_size // _LENGTHS_PER_SPAN)
    boundary = trained.data.boundary
    for samples in sources.values():
        for first in range(0, len(samples), at_once):
            spans = samples.blocks(np.arange(first, min(first + at_once, len(samples))))
            blocks = cut(spans, length)
            losses = losses_of(trained.model, trained.data, blocks).numpy()
            # The first token of a document is not predicted from the document before, as in
            # training.
            counted = np.ones_like(losses) if boundary is None else blocks[:, :-1] != boundary
            sums += losses.reshape(-1, span).sum(0)
            counts += counted.reshape(-1, span).sum(0)
    return LengthLoss(length, sums, counts)


def cut(spans: np.ndarray, length: int) -> np.ndarray:
    """Cut spans into blocks, of which neighbours share one id, as in training.

    Args:
        spans: Ids `[n, k·length + 1]`.
        length: Predictions of a block.

    Returns:
        `[n·k, length + 1]`.
    """
    starts = np.arange(0, spans.shape[1] - 1, length)
    return spans[:, starts[:, None] + np.arange(length + 1)].reshape(-1, length + 1)


def length_report(runs: Sequence[RunLengths], tolerance: float) -> Report:
    """Return the report of all runs.

    Args:
        tolerance: Largest relative change of perplexity that counts as stable.
    """
    groups = by_group(runs)
    return Report(
        experiment="E5",
        title="Length generalisation",
        criterion=(
            "perplexity at half and at one and a half times the trained length differs from that "
            f"at the trained length by at most {100 * tolerance:g} %."
        ),
        verdicts=[_verdict(group, members, tolerance) for group, members in groups.items()],
        tables=[_table(groups), _gain_table(groups)],
        notes=_notes(runs),
        content={"tolerance": tolerance, "runs": [_content(run) for run in runs]},
        figures={"length": lambda: length_figure(groups, tolerance)},
    )


def _verdict(group: str, runs: Sequence[RunLengths], tolerance: float) -> Verdict:
    parts = []
    for factor in OTHERS:
        measured = f"not possible, {runs[0].not_longer}"
        if factor in runs[0].losses:
            measured = f"{seeds_text([100 * run.change(factor) for run in runs], 1)} %"
        parts.append(f"at {100 * (factor - 1):+.0f} %: {measured}")
    held = sum(all(abs(run.change(factor)) <= tolerance for factor in run.losses) for run in runs)
    # What cannot be measured cannot hold; what was measured can still have failed.
    answer = None if runs[0].not_longer and held else held
    return Verdict(group, len(runs), answer, "; ".join(parts))


def _table(groups: Mapping[str, Sequence[RunLengths]]) -> Table:
    rows = []
    for group, runs in groups.items():
        for factor in FACTORS:
            cells = (f"not possible: {runs[0].not_longer}", NOTHING, NOTHING)
            if factor in runs[0].losses:
                perplexities = [run.losses[factor].perplexity for run in runs]
                changes = [100 * run.change(factor) for run in runs]
                predictions = f"{runs[0].losses[factor].predictions:,}"
                cells = (seeds_text(perplexities, 2), seeds_text(changes, 1), predictions)
            rows.append(
                (group, str(len(runs)), str(round(factor * runs[0].trained_length)), *cells)
            )
    header = ("variant", "n", "length", "perplexity", "change, %", "predictions")
    return text_table("Perplexity by length, mean ± sd over seeds", header, rows)


def _gain_table(groups: Mapping[str, Sequence[RunLengths]]) -> Table:
    rows = []
    for group, runs in groups.items():
        trained = runs[0].trained_length
        inside = seeds_text([float(run.gain()[trained // 2 : trained].mean()) for run in runs], 4)
        possible = 1.5 in runs[0].losses
        beyond = seeds_text(
            [float(run.gain()[trained:].mean()) if possible else None for run in runs], 4
        )
        rows.append((group, str(len(runs)), inside, beyond))
    header = ("variant", "n", "positions T/2 to T", "positions T to 3T/2")
    return text_table(
        "What context gives: change of loss against blocks of T/2, in nats", header, rows
    )


def _notes(runs: Sequence[RunLengths]) -> list[str]:
    notes = [
        "Every length is judged on the same predictions, each from what its own block shows: some "
        "rise of perplexity at half the length is the loss of context, not a failure to "
        "generalise.",
        "What context gives is below 0 where context helps. A model that makes nothing of its "
        "context shows 0 everywhere and is stable at any length, to no merit. docs/evaluation.md "
        "defines both.",
    ]
    for reason in sorted({run.not_longer for run in runs if run.not_longer}):
        affected = sorted({run.group for run in runs if run.not_longer == reason})
        notes.append(f"Not possible at +50 % for {', '.join(affected)}: {reason}.")
    return notes


def _content(run: RunLengths) -> dict[str, Any]:
    lengths = {
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
    return {
        "name": run.name,
        "group": run.group,
        "seed": run.seed,
        "trained_length": run.trained_length,
        "lengths": lengths,
        "gain_by_position": run.gain().tolist(),
        "not_possible": {"1.5": run.not_longer} if run.not_longer else {},
    }


def length_figure(groups: Mapping[str, Sequence[RunLengths]], tolerance: float) -> Figure:
    """Draw the change of perplexity by length, and what context gives by position.

    Args:
        groups: {group: what was measured of its runs}.
        tolerance: Largest relative change of perplexity that counts as stable.
    """
    figure, (changes, positions) = new_figure(1, 2, height=3.6)
    _plot_changes(changes, groups, tolerance)
    label(changes, "Change of perplexity", "length / trained length", "%")
    _plot_gain(positions, groups)
    label(
        positions,
        "What context gives, against blocks of T/2",
        "position / trained length T",
        "change of loss, nats",
    )
    legend_below(figure, changes)
    return figure


def _plot_changes(plot: Axes, groups: Mapping[str, Sequence[RunLengths]], tolerance: float) -> None:
    plot.axhspan(-100 * tolerance, 100 * tolerance, color="#ececec", zorder=0)
    text = f"criterion ±{100 * tolerance:g} %"
    at = (1, -100 * tolerance)
    remark(plot, text, at, offset=(-2, 3), ha="right")
    for index, (group, runs) in enumerate(groups.items()):
        factors = [factor for factor in FACTORS if factor in runs[0].losses]
        changes = [[100 * run.change(factor) for run in runs] for factor in factors]
        shift = 0.02 * (index - (len(groups) - 1) / 2)  # so that error bars do not hide one another
        plot_seeds(
            plot, [factor + shift for factor in factors], changes, groups=list(groups), group=group
        )
    plot.set_xticks(FACTORS)


def _plot_gain(plot: Axes, groups: Mapping[str, Sequence[RunLengths]]) -> None:
    for group, runs in groups.items():
        colour, marker = group_style(list(groups), group)
        length = runs[0].losses[max(runs[0].losses)].length
        trained = runs[0].trained_length
        buckets = pairwise(length * index // _BUCKETS for index in range(_BUCKETS + 1))
        spans = [(start, stop) for start, stop in buckets if stop > start]
        middles = [(start + stop) / 2 / trained for start, stop in spans]
        means = [
            statistics.mean(run.gain()[start:stop].mean() for run in runs) for start, stop in spans
        ]
        plot.plot(middles, means, color=colour, marker=marker, markersize=3.5, linewidth=1.2)
    plot.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    remark(plot, "trained length", (1.0, 1), offset=(3, -10), coordinates=("data", "axes fraction"))
