"""Report of the head-wise test: accuracies, paired differences with intervals, norms of the new rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.finetuning.bert.arms import Arm, Condition, Norm
from pretrain.finetuning.encoding import ASIDE
from pretrain.reporting.tables import Table
from pretrain.reporting.text import number, share
from pretrain.study.gaps import FEWEST_SEEDS, POINTS, PairedGap, adjust, gap_content, paired_gap
from pretrain.study.report import Report, Verdict, seeds_text, text_table
from pretrain.study.tables import GAP, INTERVAL, PAIRS, T_HOLM, WILCOXON_HOLM, GapColumn, GapRow, gap_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pretrain.finetuning.bert.experiment import ReservoirTest

Results = Mapping[Arm, Sequence[Mapping[str, Any]]]
_GAP_COLUMNS = (
    replace(PAIRS, title="n"),
    replace(GAP, title="points"),
    INTERVAL,
    GapColumn("d_z", lambda gap: number(gap.cohens_dz, 2)),
    replace(T_HOLM, title="t-test p"),
    replace(WILCOXON_HOLM, title="Wilcoxon p"),
    GapColumn("claim", lambda gap: _claim(gap)),
)


@dataclass(frozen=True)
class Comparison:
    """Accuracy of `arm` minus that of `control`, by seed; positive is better."""

    arm: Arm
    control: Arm
    gap: PairedGap


def compare_arms(results: Results) -> list[Comparison]:
    """Compare every arm with `unfrozen`, and orthonormal ones with each control of the same layers.

    p values are adjusted (Holm) over all of them.
    """
    baseline = Arm(Condition.unfrozen)
    pairs = [(arm, baseline) for arm in results if arm != baseline]
    for arm in results:
        if arm.condition is Condition.orthonormal:
            controls = (Condition.frozen, Condition.gaussian, Condition.reorthonormalized)
            pairs += [(arm, other) for c in controls if (other := Arm(c, arm.layers)) in results]
    by_seed = {arm: _accuracy_by_seed(runs) for arm, runs in results.items()}
    gaps = adjust([paired_gap(base.name, by_seed[arm], by_seed[base], POINTS) for arm, base in pairs])
    return [Comparison(arm, control, gap) for (arm, control), gap in zip(pairs, gaps, strict=True) if gap]


def reservoir_report(test: ReservoirTest, results: Results, tolerance: float) -> Report:
    """Return the report.

    Args:
        tolerance: the part of the accuracy of `unfrozen` at the same seed that an arm may lose.
    """
    comparisons = compare_arms(results)
    return Report(
        experiment="BERT reservoir",
        title="BERT with replaced queries and keys",
        criterion=f"accuracy ≥ {100 * (1 - tolerance):g} % of that of the same BERT with its own queries "
        "and keys, trained, at the same seed.",
        verdicts=_verdicts(comparisons, results, tolerance),
        tables=[_accuracies(results), _differences(comparisons), *_put_in(results)],
        notes=_notes(test, results),
        content={
            "tolerance": tolerance,
            "experiment": test.identity,
            "comparisons": [
                {"arm": c.arm.name, "control": c.control.name, **gap_content(c.gap)} for c in comparisons
            ],
            "runs": [{"arm": arm.name, **run} for arm, runs in results.items() for run in runs],
        },
        figures={"differences": lambda: _figure(comparisons)},
    )


def _verdicts(comparisons: Sequence[Comparison], results: Results, tolerance: float) -> list[Verdict]:
    verdicts = []
    for one in comparisons:
        if one.control.condition is Condition.unfrozen:
            base = _accuracy_by_seed(results[one.control])
            own = _accuracy_by_seed(results[one.arm])
            held = sum(accuracy >= (1 - tolerance) * base[seed] for seed, accuracy in own.items())
            numbers = f"{POINTS.signed(one.gap.mean)} points {POINTS.interval(one.gap)}"
            verdicts.append(Verdict(one.arm.name, one.gap.n, held, numbers))
    return verdicts


def _accuracy_by_seed(runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {run["seed"]: run["accuracy"] for run in runs}


def _accuracies(results: Results) -> Table:
    rows = []
    for arm, runs in results.items():
        accuracy = seeds_text([100 * run["accuracy"] for run in runs], 2)
        error = number(100 * float(np.mean([run["standard_error"] for run in runs])), 2)
        sizes = (f"{runs[0]['proof']['frozen_entries']:,}", f"{runs[0]['trainable_parameters']:,}")
        steps = seeds_text([float(run["best_step"]) for run in runs], 0)
        rows.append((arm.name, str(len(runs)), accuracy, error, *sizes, steps))
    header = ("arm", "n", "accuracy, %", "standard error of items", "frozen", "trained", "best step")
    return text_table("Accuracy on the validation examples, mean ± sd over seeds", header, rows)


def _differences(comparisons: Sequence[Comparison]) -> Table:
    rows = [GapRow((one.arm.name, one.control.name), one.gap) for one in comparisons]
    title = "Differences in accuracy, paired by seed, p after Holm"
    return gap_table(("arm", "minus"), rows, _GAP_COLUMNS, title=title, flush_left=True)


def _claim(gap: PairedGap) -> str:
    if gap.n < FEWEST_SEEDS:
        return "none: too few seeds"
    if not gap.significance_claimed:
        return "none"
    return "better" if gap.mean > 0 else "worse"


def _put_in(results: Results) -> list[Table]:
    """Return the table of the heads' norms before and after, over seeds, layers and heads."""

    def mean_of(values: np.ndarray, digits: int) -> str:
        low, high = f"{values.min():.{digits}f}", f"{values.max():.{digits}f}"
        return f"{values.mean():.{digits}f} ({low} to {high})"

    rows = []
    for arm, runs in results.items():
        for role in ("query", "key"):
            parts = [part for run in runs for part in run["replaced"] if part["role"] == role]
            if parts:
                before, after = (np.array([p[key] for p in parts]) for key in ("norms_before", "norms"))
                error = max(max(part["errors"]) for part in parts)
                norms = (mean_of(before, 3), mean_of(after, 3), mean_of(after / before, 2))
                rows.append((arm.name, role, *norms, f"{error:.1e}"))
    header = ("arm", "role", "norm before", "norm", "ratio", "max |WWᵀ − I|")
    title = "Frobenius norm of a head's rows, mean (smallest to largest)"
    return [text_table(title, header, rows)] if rows else []


def _notes(test: ReservoirTest, results: Results) -> list[str]:
    runs = [run for own in results.values() for run in own]
    config = test.bert.config
    notes = [
        f"The BERT: {config.num_hidden_layers} layers of {config.hidden_size}, {config.num_attention_heads} "
        "heads; scores are q·k / √head_dim, as ever.",
        _scale_note(test),
        "Whatever is replaced has zero biases; frozen queries and keys have frozen biases.",
        "Every arm has the same learning rate, epochs and examples set aside; the seed decides the new head, "
        "the order of the examples, dropout and the bank, so arms of one seed are pairs.",
        f"Weights are those of the best look at {share(ASIDE)} of the training examples, set aside by "
        f"the seed; the {runs[0]['items']:,} validation examples chose nothing. Their standard error is of "
        "one model over other examples of the kind; the interval is of the mean over seeds, "
        "for this one pretrained model and these examples.",
        f"Always the most frequent label would have an accuracy of {100 * runs[0]['majority']:.2f} %.",
        "Frozen tensors were compared bit for bit after training; pooler and classifier changed in each run.",
    ]
    if new := sorted({name for run in runs for name in run["made_anew"]}):
        notes.append(f"Not in the directory, made anew by the seed: {', '.join(new)}.")
    if cut := max(run["shortened"] for run in runs):
        notes.append(f"{cut} examples were cut to {test.longest} pieces.")
    return notes


def _scale_note(test: ReservoirTest) -> str:
    config = test.bert.config
    if test.norm is Norm.match:
        return (
            "Each head's rows were multiplied by one number, which gives them the Frobenius norm of what "
            "they replaced, so that only directions and the lengths within a head differ."
        )
    norm = (config.hidden_size // config.num_attention_heads) ** 0.5
    return (
        "Rows were put in as they are drawn, of length 1 (gaussian: in expectation), so a head has norm "
        f"√head_dim = {norm:.3f}; the table of norms says how far that is from what it replaced. Scores grow "
        "with the product of both ratios: with --norm match they keep the scale of the pretrained ones, and "
        "only directions differ."
    )


def _figure(comparisons: Sequence[Comparison]) -> Figure:
    from pretrain.reporting.plots import GREY, group_style, new_figure

    figure, (plot,) = new_figure(1, 1, height=0.9 + 0.32 * len(comparisons))
    controls = list(dict.fromkeys(c.control.condition.value for c in comparisons))
    for place, comparison in enumerate(reversed(comparisons)):
        gap = comparison.gap
        colour, marker = group_style(controls, comparison.control.condition.value)
        plot.plot([100 * d for d in gap.differences], [place] * gap.n, "|", color=GREY, markersize=7)
        if gap.low is not None and gap.high is not None:
            plot.plot([100 * gap.low, 100 * gap.high], [place, place], color=colour, linewidth=1.4)
        plot.plot([100 * gap.mean], [place], color=colour, marker=marker, markersize=6)
    plot.axvline(0.0, color=GREY, linewidth=1)
    plot.set_yticks(
        range(len(comparisons)), [f"{c.arm.name} − {c.control.name}" for c in reversed(comparisons)]
    )
    plot.set_xlabel("difference in accuracy, points: seeds, mean, interval")
    return figure
