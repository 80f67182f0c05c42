"""The report of E1 from its trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pretrain.evaluation.heads.approximation import (
    BANDWIDTH,
    BATCH,
    HEADS,
    LENGTH,
    TEST_SEQUENCES,
    Experiment,
    Trial,
    errors,
)
from pretrain.reporting.tables import Table
from pretrain.study.gaps import CONFIDENCE, SCORES, paired_gap
from pretrain.study.report import Report, Verdict, seeds_text, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIGITS = 4


def approximation_report(experiment: Experiment, trials: Sequence[Trial], tolerance: float) -> Report:
    """Error by width and depth; every variant beside the first.

    Args:
        tolerance: how far, relatively, a variant's error may be above the first one's in the largest model.
    """
    baseline = experiment.variants[0]
    width, depth = experiment.widths[-1], experiment.depths[-1]
    criterion = (
        f"the error in the largest model (width {width}, depth {depth}) is below that in the smallest (width "
        f"{experiment.widths[0]}, depth {experiment.depths[0]}), and at most {100 * tolerance:g} % above "
        f"that of {baseline}, seed by seed."
    )
    return Report(
        experiment="E1",
        title="Function approximation",
        criterion=criterion,
        verdicts=[_verdict(experiment, trials, variant, tolerance) for variant in experiment.variants],
        tables=[_error_table(experiment, trials), _ratio_table(experiment, trials)],
        notes=_notes(experiment),
        content={
            "tolerance": tolerance,
            "settings": asdict(experiment),
            "trials": [asdict(trial) for trial in trials],
        },
        figures={"approximation": lambda: _figure(experiment, trials)},
    )


def _verdict(experiment: Experiment, trials: Sequence[Trial], variant: str, tolerance: float) -> Verdict:
    small = errors(trials, variant, experiment.widths[0], experiment.depths[0])
    large = errors(trials, variant, experiment.widths[-1], experiment.depths[-1])
    best = errors(trials, experiment.variants[0], experiment.widths[-1], experiment.depths[-1])
    excess = [100 * (own / other - 1) for own, other in zip(large, best, strict=True)]
    falls = [after < before for before, after in zip(small, large, strict=True)]
    text = (
        f"error {seeds_text(small, DIGITS)} in the smallest, {seeds_text(large, DIGITS)} in the largest model"
    )
    if variant == experiment.variants[0]:
        return Verdict(variant, len(large), sum(falls), f"{text} (the baseline: judged by the fall alone)")
    near = [percent <= 100 * tolerance for percent in excess]
    held = sum(both for both in map(min, falls, near))
    return Verdict(variant, len(large), held, f"{text}, {seeds_text(excess, 1)} % above the baseline")


def _error_table(experiment: Experiment, trials: Sequence[Trial]) -> Table:
    rows = []
    for width, depth in _places(experiment):
        cells = [seeds_text(errors(trials, variant, width, depth), DIGITS) for variant in experiment.variants]
        rows.append((str(width), str(depth), str(experiment.seeds), *cells))
    return text_table("Error, mean ± sd over seeds", ("width", "depth", "n", *experiment.variants), rows)


def _ratio_table(experiment: Experiment, trials: Sequence[Trial]) -> Table:
    baseline, *others = experiment.variants
    rows = []
    for width, depth in _places(experiment):
        reference = errors(trials, baseline, width, depth)
        cells = [_ratio_text(errors(trials, variant, width, depth), reference) for variant in others]
        rows.append((str(width), str(depth), str(experiment.seeds), *cells))
    header = ("width", "depth", "n", *others)
    title = (
        f"Error / error of {baseline} at the same size and seed: geometric mean with its "
        f"{100 * CONFIDENCE:g} % interval"
    )
    return text_table(title, header, rows)


def _ratio_text(own: Sequence[float], reference: Sequence[float]) -> str:
    """Of errors at the same seeds; the interval is taken on a logarithmic scale, as ratios spread."""
    logarithms, others = (dict(enumerate(map(math.log, values))) for values in (own, reference))
    gap = paired_gap("", logarithms, others, SCORES)
    assert gap is not None
    mean = f"{math.exp(gap.mean):.2f}"
    if gap.low is None or gap.high is None:
        return mean
    return f"{mean} [{math.exp(gap.low):.2f}, {math.exp(gap.high):.2f}]"


def _places(experiment: Experiment) -> list[tuple[int, int]]:
    return [(width, depth) for width in experiment.widths for depth in experiment.depths]


def _notes(experiment: Experiment) -> list[str]:
    return [
        "The task is kernel regression in context, y_t = Σ_{s ≤ t} K(x_t, x_s) z_s / Σ_{s ≤ t} K(x_t, x_s) "
        f"with a Gaussian kernel of width {BANDWIDTH:g}, on sequences of {LENGTH} random (x, z): continuous, "
        "causal and not computable without comparing contents.",
        "Error is the mean squared error divided by the variance of the targets: 1 for the best constant. It "
        f"is taken on {TEST_SEQUENCES} fixed sequences; training sees fresh ones at every step "
        f"({experiment.steps} steps of {BATCH} sequences, peak learning rate {experiment.learning_rate:g}, "
        "not tuned per size or variant).",
        f"Every model has {HEADS} heads of width / {HEADS}; width is hidden_size, depth num_layers.",
        "A trained model's error contains what the optimizer did not reach, and a finite grid shows a trend, "
        "not a limit: neither that the error goes to 0 nor that it does not follows from this.",
    ]


def _figure(experiment: Experiment, trials: Sequence[Trial]) -> Figure:
    from pretrain.reporting.plots import label, legend_below, new_figure

    figure, (by_width, by_depth) = new_figure(1, 2, height=3.4)
    width, depth = experiment.widths[-1], experiment.depths[-1]
    _plot(by_width, experiment, trials, [(value, depth) for value in experiment.widths], experiment.widths)
    label(by_width, f"By width, at depth {depth}", "hidden_size", "error (1: best constant)")
    by_depth.sharey(by_width)
    _plot(by_depth, experiment, trials, [(width, value) for value in experiment.depths], experiment.depths)
    label(by_depth, f"By depth, at width {width}", "num_layers", "error (1: best constant)")
    legend_below(figure, by_width)
    return figure


def _plot(
    plot: Axes,
    experiment: Experiment,
    trials: Sequence[Trial],
    places: Sequence[tuple[int, int]],
    values: Sequence[int],
) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    from pretrain.reporting.plots import group_style

    for place, variant in enumerate(experiment.variants):
        shift = 1.03 ** (place - (len(experiment.variants) - 1) / 2)  # error bars must not hide one another
        colour, marker = group_style(experiment.variants, variant)
        found = [errors(trials, variant, *place) for place in places]
        spread = [statistics.stdev(one) if len(one) > 1 else 0.0 for one in found]
        means = [statistics.mean(one) for one in found]
        plot.errorbar(
            [value * shift for value in values],
            means,
            yerr=spread,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.4,
            capsize=2.5,
            label=variant,
        )
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.xaxis.set_major_locator(FixedLocator(list(values)))
    plot.xaxis.set_minor_locator(FixedLocator([]))
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    plot.yaxis.set_minor_formatter(NullFormatter())
