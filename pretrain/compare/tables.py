"""Tables of a comparison, for the report and for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.cost import Cost, Quartiles
from pretrain.compare.theory import Theory
from pretrain.reporting.statistics import Spread
from pretrain.reporting.tables import Table
from pretrain.reporting.text import (
    NOTHING,
    byte_count,
    interval,
    mean_sd,
    number,
    percent,
    share,
    signed,
)
from pretrain.study import tables as study
from pretrain.study.tables import GapRow, p_value

NOT_FINITE = "not finite"
"""In place of the mean of a loss that no run has."""
LONG_LABEL = 20
"""A label of more characters is broken before its adapters on the terminal."""


def validation_table(comparison: Comparison) -> Table:
    """Return loss and perplexity of each variant, over all sources and by source."""
    sources = comparison.sources if len(comparison.sources) > 1 else ()
    rows = [
        (
            variant.name,
            str(len(variant.runs)),
            _mean_or_diverged(variant.validation_loss, 4),
            _mean_or_diverged(variant.validation_perplexity, 2),
            _over_unigram(variant),
            *(_mean_or_diverged(variant.perplexity_by_source.get(source), 2) for source in sources),
        )
        for variant in comparison.variants
    ]
    header = ("variant", "n", "validation loss", "perplexity", "perplexity / unigram")
    return Table((*header, *(f"perplexity: {source}" for source in sources)), rows)


def _mean_or_diverged(value: Spread | None, digits: int, separator: str = " ") -> str:
    return mean_sd(value, digits, separator, NOT_FINITE)


def _over_unigram(variant: Variant) -> str:
    if variant.validation_perplexity is None:
        return NOTHING
    return number(variant.validation_perplexity.mean / variant.runs[0].result.unigram_perplexity, 3)


def gap_table(comparison: Comparison) -> Table:
    """Return each variant's paired gap, its interval, effect size and tests."""
    rows = [GapRow((variant.name,), variant.gap) for variant in comparison.others]
    gap = replace(study.GAP, title="gap, nats/token")
    columns = (study.PAIRS, gap, study.INTERVAL, study.PERPLEXITY, study.LIES_WITHIN, study.EFFECT)
    return study.gap_table(("variant",), rows, (*columns, *study.TESTS), claims=True)


def source_gap_table(comparison: Comparison) -> Table:
    """Return the gap on each source with its interval; nothing is tested here."""
    rows = []
    for variant in comparison.others:
        gaps = [variant.source_gaps.get(source) for source in comparison.sources]
        cells = [NOTHING if g is None else f"{signed(g.mean)} {interval(g.low, g.high)}" for g in gaps]
        rows.append((variant.name, *cells))
    return Table(("variant", *comparison.sources), rows)


def quality_summary(comparison: Comparison) -> Table:
    """Return loss, perplexity and gap of each variant for a terminal of 100 columns."""
    header = (
        "variant",
        "n",
        "validation\nloss",
        "perplexity",
        "gap, nats/token\n(of perplexity)",
        "d_z",
        "p, Holm",
    )
    rows = []
    for variant in comparison.variants:
        gap = variant.gap
        cells = ["baseline" if variant.is_baseline else "no pair", "", ""]
        if gap is not None:
            span = "" if gap.low is None else "\n" + interval(gap.low, gap.high, 3)
            size = f"{signed(gap.mean, 3)} ({percent(gap.perplexity_ratio)}){span}"
            cells = [size, signed(gap.cohens_dz, 2), p_value(gap.t_p_holm, gap.n)]
        losses = _mean_or_diverged(variant.validation_loss, 4, "\n")
        perplexities = _mean_or_diverged(variant.validation_perplexity, 2, "\n")
        rows.append((_in_lines(variant), str(len(variant.runs)), losses, perplexities, *cells))
    return Table(header, rows)


def cost_summary(comparison: Comparison) -> Table:
    """Return speed, parameters and bytes of each variant for a terminal of 100 columns."""
    rows = []
    for variant in comparison.variants:
        base = comparison.variant(variant.baseline)
        cells = [_measured_cell(measure, variant, base, whole=False) for _, measure in SUMMARY]
        rows.append([_in_lines(variant), *(cell.replace(" (", "\n(", 1) for cell in cells)])
    return Table(("variant", *(title for title, _ in SUMMARY)), rows)


def _in_lines(variant: Variant) -> str:
    label = variant.label.replace(" ", "\n")
    if len(label) > LONG_LABEL:
        label = label.replace("+", "\n+")
    return "\n".join(part for part in (label, variant.stratum) if part)


def convergence_table(comparison: Comparison) -> Table:
    """Return steps and tokens to the loss that the baseline had at each share of its tokens."""
    rows = []
    for variant in comparison.variants:
        cells = []
        for reach in variant.reaches:
            if reach.steps is None or reach.tokens is None:
                cells.append(f"{reach.reached} of {reach.pairs} runs got there")
                continue
            ratio = "" if reach.token_ratio is None else f" ({percent(reach.token_ratio.mean)})"
            ratio = "" if variant.is_baseline else ratio
            cells.append(f"{mean_sd(reach.steps, 0)}; {number(reach.tokens.mean, 0)}{ratio}")
        rows.append((variant.name, *cells))
    fractions = [f"{share(reach.fraction)}: steps; tokens" for reach in comparison.variants[0].reaches]
    return Table(("variant", *fractions), rows)


def stability_table(comparison: Comparison) -> Table:
    """Return loss variance, gradient norm and its spikes."""
    rows = []
    for variant in comparison.variants:
        stability = variant.stability
        rows.append(
            (
                variant.name,
                mean_sd(stability.loss_variance, 5),
                mean_sd(stability.gradient_norm, 3),
                mean_sd(stability.gradient_norm_variation, 3),
                f"{stability.spikes:,} in {stability.records:,}",
            )
        )
    header = (
        "variant",
        "loss variance",
        "gradient norm",
        "its coefficient of variation",
        "spikes, in records",
    )
    return Table(header, rows)


@dataclass(frozen=True)
class Measure:
    """Row of the cost table: the measured number and, where there is a formula, the expected one.

    `cell` shows the measured number with more than `show` does; of `ratio_only` formulas only the relative
    distance to the baseline is shown.
    """

    title: str
    show: Callable[[float | None], str]
    measured: Callable[[Cost], float | None] = lambda cost: None
    expected: Callable[[Theory], float | None] = lambda theory: None
    cell: Callable[[Cost], str] | None = None
    ratio_only: bool = False


def cost_table(comparison: Comparison, stratum: str) -> Table:
    """Return measures down, variants of one stratum across; below a measured row, the same by formula."""
    variants = [variant for variant in comparison.variants if variant.stratum == stratum]
    pairs = [(variant, comparison.variant(variant.baseline)) for variant in variants]
    rows: list[tuple[str, ...]] = []
    for measure in MEASURES:
        is_measured = any(measure.measured(variant.cost) is not None for variant in variants)
        if is_measured:
            rows.append((measure.title, *(_measured_cell(measure, *pair) for pair in pairs)))
        if any(_expected(measure, variant) is not None for variant in variants):
            title = "· by formula" if is_measured else f"{measure.title}, by formula"
            rows.append((title, *(_expected_cell(measure, *pair) for pair in pairs)))
    return Table(("", *(variant.label for variant in variants)), rows)


def _measured_cell(measure: Measure, variant: Variant, base: Variant, *, whole: bool = True) -> str:
    value = measure.measured(variant.cost)
    text = measure.cell(variant.cost) if measure.cell and whole else measure.show(value)
    return text + _change(variant, value, measure.measured(base.cost))


def _expected_cell(measure: Measure, variant: Variant, base: Variant) -> str:
    value = _expected(measure, variant)
    text = "" if measure.ratio_only else measure.show(value)
    return (text + _change(variant, value, _expected(measure, base))).strip() or NOTHING


def _expected(measure: Measure, variant: Variant) -> float | None:
    return measure.expected(variant.theory) if variant.theory else None


def _change(variant: Variant, value: float | None, base: float | None) -> str:
    """Return the relative distance to the baseline, in parentheses."""
    if variant.is_baseline or value is None or not base or value == base:
        return ""
    return f" ({percent(value / base)})"


def runs_table(comparison: Comparison) -> Table:
    """Return every run with its result."""
    rows = [
        (
            variant.name,
            str(run.seed),
            number(run.result.validation_loss),
            number(run.result.validation_perplexity, 2),
            str(run.path),
        )
        for variant in comparison.variants
        for run in variant.runs
    ]
    return Table(("variant", "seed", "validation loss", "perplexity", "run"), rows, text_columns=(0, 4))


def _median(value: Quartiles | None) -> float | None:
    return None if value is None else value.median


def _quartile_text(value: Quartiles | None, digits: int) -> str:
    """Return `median [first quartile, third quartile]`."""
    if value is None:
        return NOTHING
    low, high = number(value.low, digits), number(value.high, digits)
    return f"{number(value.median, digits)} [{low}, {high}]"


def _count(value: float | None) -> str:
    return number(value, 0)


def _percentage(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def _counted(
    title: str, of: Callable[[Cost | Theory], int], show: Callable[[float | None], str] = byte_count
) -> Measure:
    """Return a measure that is counted and has a formula."""
    return Measure(title, show, measured=of, expected=of)


SPEED = Measure(
    "tokens/s",
    _count,
    lambda cost: _median(cost.tokens_per_second),
    cell=lambda cost: _quartile_text(cost.tokens_per_second, 0),
)
TRAINABLE = _counted("trainable parameters", lambda cost: cost.size.trainable_parameters, _count)
FROZEN = _counted("frozen parameters", lambda cost: cost.size.frozen_parameters, _count)
CHECKPOINT = _counted("checkpoint", lambda cost: cost.states.checkpoint_bytes)
MEASURES = (
    TRAINABLE,
    FROZEN,
    Measure("FLOPs per token", _count, expected=lambda theory: theory.executed_flops_per_token),
    Measure(
        "step time, s",
        number,
        lambda cost: _median(cost.step_seconds),
        lambda theory: theory.executed_flops_per_token,
        lambda cost: _quartile_text(cost.step_seconds, 4),
        ratio_only=True,
    ),
    SPEED,
    Measure("MFU", _percentage, lambda cost: _median(cost.mfu)),
    Measure("HFU", _percentage, lambda cost: _median(cost.hfu)),
    _counted("weights that train", lambda cost: cost.states.weight_bytes),
    _counted("frozen bank", lambda cost: cost.states.frozen_bytes),
    _counted("gradients", lambda cost: cost.states.gradient_bytes),
    _counted("optimizer state", lambda cost: cost.states.optimizer_state_bytes),
    _counted("these four together", lambda cost: cost.states.in_memory),
    Measure("peak memory of a device", byte_count, lambda cost: cost.peak_device_bytes),
    Measure("peak memory of a host process", byte_count, lambda cost: cost.peak_host_bytes),
    CHECKPOINT,
)
SUMMARY = (
    ("tokens/s", SPEED),
    ("trainable\nparameters", TRAINABLE),
    ("frozen\nparameters", FROZEN),
    (
        "gradients +\noptimizer state",
        _counted("", lambda cost: cost.states.gradient_bytes + cost.states.optimizer_state_bytes),
    ),
    ("checkpoint", CHECKPOINT),
)
