"""Tables of a comparison, for the report and for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pretrain.compare.comparison import Comparison, Cost, Quartiles, Variant
from pretrain.compare.compute import EqualCompute, Ratio
from pretrain.compare.theory import Theory
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
from pretrain.study.tables import GapColumn, GapRow, p_value

NOT_FINITE = "not finite"
"""In place of the mean of a loss that no run has."""
LONG_LABEL = 20
"""A label of more characters is broken before its adapters on the terminal."""


def validation_table(comparison: Comparison) -> Table:
    """Return loss and perplexity of each variant, over all sources and by source."""
    sources = comparison.sources if len(comparison.sources) > 1 else ()
    in_bits = any(variant.bytes_per_token for variant in comparison.variants)
    rows = []
    for variant in comparison.variants:
        perplexity, unigram = (
            variant.validation_perplexity,
            variant.runs[0].result.unigram_perplexity,
        )
        cells = [
            mean_sd(variant.validation_loss, 4, missing=NOT_FINITE),
            mean_sd(perplexity, 2, missing=NOT_FINITE),
            NOTHING if perplexity is None else number(perplexity.mean / unigram, 3),
        ]
        of_sources = [variant.perplexity_by_source.get(source) for source in sources]
        cells += [mean_sd(value, 2, missing=NOT_FINITE) for value in of_sources]
        loss = variant.validation_loss
        cells += [number(variant.bits_per_byte(loss.mean if loss else None))] if in_bits else []
        rows.append((variant.name, str(len(variant.runs)), *cells))
    header = ("variant", "n", "validation loss", "perplexity", "perplexity / unigram")
    bits = ["loss, bits/byte"] if in_bits else []
    return Table((*header, *(f"perplexity: {source}" for source in sources), *bits), rows)


def gap_table(comparison: Comparison) -> Table:
    """Return each variant's paired gap, its interval, effect size and tests."""
    rows = [GapRow((variant.name,), variant.gap) for variant in comparison.others]
    gap = replace(study.GAP, title="gap, nats/token")
    columns = (study.PAIRS, gap, study.INTERVAL, study.PERPLEXITY, study.LIES_WITHIN, study.EFFECT)
    of = {id(variant.gap): variant for variant in comparison.others}
    bits = GapColumn("bits/byte", lambda gap: signed(of[id(gap)].bits_per_byte(gap.mean)))
    beside = [bits] if any(variant.bytes_per_token for variant in comparison.variants) else []
    beside += [
        GapColumn(
            "of what context taught", lambda gap: _percentage(of[id(gap)].of_context(gap.mean))
        )
    ]
    return study.gap_table(("variant",), rows, (*columns, *beside, *study.TESTS), claims=True)


def compute_table(comparison: Comparison) -> Table:
    """Return each variant's cost to the baseline's loss, and its gap at equal compute."""
    rows = []
    for variant in comparison.others:
        compute = variant.compute or EqualCompute(None)
        gap, star = compute.gap, "*" if compute.beyond else ""
        cells = [
            f"{_times(ratio)}{star}" for ratio in (compute.token_ratio, compute.effective_compute)
        ]
        shown = NOTHING if gap is None else f"{signed(gap.mean)} {interval(gap.low, gap.high)}"
        rows.append(
            (variant.name, percent(compute.cost), *cells, shown, signed(compute.break_even))
        )
    unit = comparison.compute_unit
    titles = (
        f"{unit} a token",
        "tokens to the baseline's loss",
        "effective compute",
        f"gap at equal {unit}",
    )
    return Table(("variant", *titles, "break-even gap"), rows)


def _times(ratio: Ratio | None) -> str:
    """Return a ratio with its interval; a dash for None."""
    if ratio is None:
        return NOTHING
    ends = "" if ratio.low is None else f" [{number(ratio.low, 2)}, {number(ratio.high, 2)}]"
    return f"× {number(ratio.mean, 2)}{ends}"


def source_gap_table(comparison: Comparison) -> Table:
    """Return the gap on each source with its interval; nothing is tested here."""
    rows = []
    for variant in comparison.others:
        gaps = [variant.source_gaps.get(source) for source in comparison.sources]
        cells = [
            NOTHING if g is None else f"{signed(g.mean)} {interval(g.low, g.high)}" for g in gaps
        ]
        rows.append((variant.name, *cells))
    return Table(("variant", *comparison.sources), rows)


def quality_summary(comparison: Comparison) -> Table:
    """Return loss, perplexity and gap of each variant for a terminal of 100 columns."""
    rows = []
    for variant in comparison.variants:
        gap = variant.gap
        cells = ["baseline" if variant.is_baseline else "no pair", "", ""]
        if gap is not None:
            span = "" if gap.low is None else "\n" + interval(gap.low, gap.high, 3)
            size = f"{signed(gap.mean, 3)} ({percent(gap.perplexity_ratio)}){span}"
            cells = [size, signed(gap.cohens_dz, 2), p_value(gap.t_p_holm, gap.n)]
        losses = mean_sd(variant.validation_loss, 4, "\n", NOT_FINITE)
        perplexities = mean_sd(variant.validation_perplexity, 2, "\n", NOT_FINITE)
        rows.append((_in_lines(variant), str(len(variant.runs)), losses, perplexities, *cells))
    gap_title = "gap, nats/token\n(of perplexity)"
    return Table(
        ("variant", "n", "validation\nloss", "perplexity", gap_title, "d_z", "p, Holm"), rows
    )


def cost_summary(comparison: Comparison) -> Table:
    """Return speed, parameters and bytes of each variant for a terminal of 100 columns."""
    rows = []
    for variant in comparison.variants:
        base = comparison.variant(variant.baseline)
        cells = [_measured(measure, variant, base) for _, measure in SUMMARY]
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
            cell = f"{mean_sd(reach.steps, 0)}; {number(reach.tokens.mean, 0)}"
            if reach.token_ratio is not None and not variant.is_baseline:
                cell += f" ({percent(reach.token_ratio.mean)})"
            cells.append(cell)
        rows.append((variant.name, *cells))
    fractions = [
        f"{share(reach.fraction)}: steps; tokens" for reach in comparison.variants[0].reaches
    ]
    return Table(("variant", *fractions), rows)


def stability_table(comparison: Comparison) -> Table:
    """Return loss variance, gradient norm and its spikes."""
    rows = [
        (
            variant.name,
            mean_sd(variant.stability.loss_variance, 5),
            mean_sd(variant.stability.gradient_norm, 3),
            mean_sd(variant.stability.gradient_norm_variation, 3),
            f"{variant.stability.spikes:,} in {variant.stability.records:,}",
        )
        for variant in comparison.variants
    ]
    variation = "its coefficient of variation"
    return Table(
        ("variant", "loss variance", "gradient norm", variation, "spikes, in records"), rows
    )


@dataclass(frozen=True)
class Measure:
    """Row of the cost table: the measured number and, where there is a formula, the expected one.

    Attributes:
        field: where the number stands in `Cost`, and the expected one in `Theory`.
        digits: of the median and quartiles, where the cost table shows these.
        formula: where the expected number of another unit stands, of which only the ratio is shown.
    """

    title: str
    field: str
    show: Callable[[float | None], str] = byte_count
    digits: int | None = None
    formula: str = ""


def cost_table(comparison: Comparison, stratum: str) -> Table:
    """Return measures down, variants of one stratum across; below a measured row, the same by formula."""
    variants = [variant for variant in comparison.variants if variant.stratum == stratum]
    rows: list[tuple[str, ...]] = []
    for measure in MEASURES:
        measured, expected = [], []
        for variant in variants:
            base = comparison.variant(variant.baseline)
            measured.append(_measured(measure, variant, base, measure.digits))
            expected.append(_expected(measure, variant, base))
        title = measure.title
        if any(_number(variant.cost, measure.field) is not None for variant in variants):
            rows.append((title, *measured))
        if any(
            _number(variant.theory, measure.formula or measure.field) is not None
            for variant in variants
        ):
            title = "· by formula" if rows and rows[-1][0] == title else f"{title}, by formula"
            rows.append((title, *expected))
    return Table(("", *(variant.label for variant in variants)), rows)


def _measured(measure: Measure, variant: Variant, base: Variant, digits: int | None = None) -> str:
    """Return the measured number; where `digits` are given, the median with its quartiles."""
    value = _number(variant.cost, measure.field)
    text = measure.show(value)
    if digits is not None and value is not None:
        spread: Quartiles = getattr(variant.cost, measure.field)
        low, high = number(spread.low, digits), number(spread.high, digits)
        text = f"{number(spread.median, digits)} [{low}, {high}]"
    return text + _change(variant, value, _number(base.cost, measure.field))


def _expected(measure: Measure, variant: Variant, base: Variant) -> str:
    value, other = (_number(of.theory, measure.formula or measure.field) for of in (variant, base))
    text = "" if measure.formula else measure.show(value)
    return (text + _change(variant, value, other)).strip() or NOTHING


def _number(record: Cost | Theory | None, field: str) -> float | None:
    """Return the number at a dotted path, of quartiles the median; None where the record has none."""
    value: Any = record
    for name in field.split("."):
        value = getattr(value, name, None)
    return value.median if isinstance(value, Quartiles) else value


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
    return Table(
        ("variant", "seed", "validation loss", "perplexity", "run"), rows, text_columns=(0, 4)
    )


def _count(value: float | None) -> str:
    return number(value, 0)


def _percentage(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


SPEED = Measure("tokens/s", "tokens_per_second", _count, digits=0)
TRAINABLE = Measure("trainable parameters", "size.trainable_parameters", _count)
FROZEN = Measure("frozen parameters", "size.frozen_parameters", _count)
CHECKPOINT = Measure("checkpoint", "states.checkpoint_bytes")
MEASURES = (
    TRAINABLE,
    FROZEN,
    Measure("FLOPs per token", "executed_flops_per_token", _count),
    Measure("step time, s", "step_seconds", number, digits=4, formula="executed_flops_per_token"),
    SPEED,
    Measure("MFU", "mfu", _percentage),
    Measure("HFU", "hfu", _percentage),
    Measure("weights that train", "states.weight_bytes"),
    Measure("frozen bank", "states.frozen_bytes"),
    Measure("gradients", "states.gradient_bytes"),
    Measure("optimizer state", "states.optimizer_state_bytes"),
    Measure("these four together", "states.in_memory"),
    Measure("peak memory of a device", "peak_device_bytes"),
    Measure("peak memory of a host process", "peak_host_bytes"),
    CHECKPOINT,
)
"""Rows of the cost table; another number of `Cost` or `Theory` needs one more here."""
SUMMARY = (
    ("tokens/s", SPEED),
    ("trainable\nparameters", TRAINABLE),
    ("frozen\nparameters", FROZEN),
    ("gradients +\noptimizer state", Measure("", "states.gradients_and_optimizer_state")),
    ("checkpoint", CHECKPOINT),
)
"""(title, measure) of the columns that the terminal shows."""
