"""Tables of a comparison, for the report and for the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from laboratory.compare.comparison import Comparison, Cost, Quartiles, Variant
from laboratory.compare.compute import EqualCompute, Ratio
from laboratory.compare.theory import Theory
from laboratory.study import tables as study
from laboratory.study.gaps import FEWEST_SEEDS
from laboratory.study.tables import gap_text, p_value
from pretrain.reporting.tables import Column, Table, table_of
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

NOT_FINITE = "not finite"
"""In place of the mean of a loss that no run has."""
LONG_LABEL = 20
"""A label of more characters is broken before its adapters on the terminal."""
LONG_WORD = 12
"""A word of more characters is broken after an underscore there, so that 80 columns are enough."""
NAME: Column[Variant] = Column("variant", lambda variant: variant.name, in_words=True)


def validation_table(comparison: Comparison) -> Table:
    """Return loss and perplexity of each variant, over all sources and by source."""
    columns: list[Column[Variant]] = [
        NAME,
        Column("n", lambda variant: str(len(variant.runs))),
        Column("validation loss", lambda variant: _loss(variant.validation_loss, 4)),
        Column("perplexity", lambda variant: _loss(variant.validation_perplexity, 2)),
        Column("perplexity / unigram", _of_unigram),
    ]
    if len(comparison.sources) > 1:
        columns += [_perplexity_of(source) for source in comparison.sources]
    if comparison.in_bits:
        columns.append(Column("loss, bits/byte", lambda variant: number(variant.loss_bits)))
    return table_of(comparison.variants, columns)


def _loss(value: Any, digits: int, separator: str = " ") -> str:
    return mean_sd(value, digits, separator, NOT_FINITE)


def _of_unigram(variant: Variant) -> str:
    perplexity = variant.validation_perplexity
    unigram = variant.runs[0].result.unigram_perplexity
    return NOTHING if perplexity is None else number(perplexity.mean / unigram, 3)


def _perplexity_of(source: str) -> Column[Variant]:
    title = f"perplexity: {source}"
    return Column(title, lambda variant: _loss(variant.perplexity_by_source.get(source), 2))


def gap_table(comparison: Comparison) -> Table:
    """Return each variant's paired gap; interval, effect size and tests where pairs allow them."""
    most = max((variant.gap.n for variant in comparison.others if variant.gap), default=0)
    spread = [study.LIES_WITHIN, study.EFFECT] if most > 1 else []
    columns: list[Column[Variant]] = [
        NAME,
        study.PAIRS,
        replace(study.GAP, title="gap, nats/token"),
        *([study.INTERVAL] if most > 1 else []),
        study.PERPLEXITY,
        *spread,
    ]
    if comparison.in_bits:
        columns.append(Column("bits/byte", lambda variant: signed(variant.gap_bits)))
    columns += [
        Column("of what context taught", lambda variant: _percentage(variant.gap_of_context)),
        *(study.TESTS if most >= FEWEST_SEEDS else ()),
        study.CLAIM,
    ]
    return table_of(comparison.others, columns)


def compute_table(comparison: Comparison) -> Table:
    """Return each variant's cost to the baseline's loss, and its gap at equal compute."""
    unit = comparison.compute_unit
    columns = [
        NAME,
        _of_compute(f"{unit} a token", lambda of: percent(of.cost)),
        _of_compute("tokens to the baseline's loss", lambda of: _times(of.token_ratio, of)),
        _of_compute("effective compute", lambda of: _times(of.effective_compute, of)),
        _of_compute(f"gap at equal {unit}", lambda of: gap_text(of.gap) + _star(of.gap_beyond)),
        _of_compute("break-even gap", lambda of: signed(of.break_even) + _star(of.gap_beyond)),
    ]
    return table_of(comparison.others, columns)


def _of_compute(title: str, show: Callable[[EqualCompute], str]) -> Column[Variant]:
    return Column(title, lambda variant: show(variant.compute or EqualCompute(None)))


def _times(ratio: Ratio | None, compute: EqualCompute) -> str:
    """Return a ratio with its interval, starred if it needed the curve past its end."""
    text = NOTHING
    if ratio is not None:
        ends = "" if ratio.low is None else f" [{number(ratio.low, 2)}, {number(ratio.high, 2)}]"
        text = f"× {number(ratio.mean, 2)}{ends}"
    return text + _star(compute.beyond)


def _star(beyond: int) -> str:
    return "*" if beyond else ""


def source_gap_table(comparison: Comparison) -> Table:
    """Return the gap on each source with its interval; nothing is tested here."""
    return table_of(comparison.others, [NAME, *map(_gap_on, comparison.sources)])


def _gap_on(source: str) -> Column[Variant]:
    return Column(source, lambda variant: gap_text(variant.source_gaps.get(source)))


def quality_summary(comparison: Comparison) -> Table:
    """Return loss, perplexity and gap of each variant for a terminal of 100 columns."""
    tested = [
        study.gap_column("d_z", lambda gap: signed(gap.cohens_dz, 2), missing=""),
        study.gap_column("p, Holm", lambda gap: p_value(gap.t_p_holm, gap.n), missing=""),
    ]
    columns: list[Column[Variant]] = [
        Column("variant", _in_lines, in_words=True),
        Column("n", lambda variant: str(len(variant.runs))),
        Column("validation\nloss", lambda variant: _loss(variant.validation_loss, 4, "\n")),
        Column("perplexity", lambda variant: _loss(variant.validation_perplexity, 2, "\n")),
        Column("gap, nats/token\n(of perplexity)", _gap_in_lines),
        *tested,
    ]
    return table_of(comparison.variants, columns)


def _gap_in_lines(variant: Variant) -> str:
    gap = variant.gap
    if gap is None:
        return "baseline" if variant.is_baseline else "no pair"
    span = "" if gap.low is None else "\n" + interval(gap.low, gap.high, 3)
    return f"{signed(gap.mean, 3)} ({percent(gap.perplexity_ratio)}){span}"


def cost_summary(comparison: Comparison) -> Table:
    """Return speed, parameters and bytes of each variant for a terminal of 100 columns."""
    rows = []
    for variant in comparison.variants:
        base = comparison.base_of(variant)
        cells = [_measured(measure, variant, base) for _, measure in SUMMARY]
        rows.append([_in_lines(variant), *(cell.replace(" (", "\n(", 1) for cell in cells)])
    return Table(("variant", *(title for title, _ in SUMMARY)), rows)


def _in_lines(variant: Variant) -> str:
    label = variant.label.replace(" ", "\n")
    if len(label) > LONG_LABEL:
        label = label.replace("+", "\n+")
    label = "\n".join(map(_broken, label.split("\n")))
    return "\n".join(part for part in (label, variant.stratum) if part)


def _broken(word: str) -> str:
    """Return a word in lines of at most LONG_WORD characters, where underscores allow it."""
    lines = [""]
    for part in re.findall(r"[^_]*_?", word):
        if lines[-1] and len(lines[-1]) + len(part) > LONG_WORD:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def convergence_table(comparison: Comparison) -> Table:
    """Return steps and tokens to the loss that the baseline had at each share of its tokens."""
    fractions = enumerate(comparison.variants[0].reaches)
    columns = [
        _reached(f"{share(reach.fraction)}: steps; tokens", index) for index, reach in fractions
    ]
    return table_of(comparison.variants, [NAME, *columns])


def _reached(title: str, index: int) -> Column[Variant]:
    def cell(variant: Variant) -> str:
        reach = variant.reaches[index]
        if reach.steps is None or reach.tokens is None:
            return f"{reach.reached} of {reach.pairs} runs got there"
        text = f"{mean_sd(reach.steps, 0)}; {number(reach.tokens.mean, 0)}"
        if reach.token_ratio is not None and not variant.is_baseline:
            text += f" ({percent(reach.token_ratio.mean)})"
        return text

    return Column(title, cell)


def stability_table(comparison: Comparison) -> Table:
    """Return loss variance, gradient norm and its spikes."""
    columns: list[Column[Variant]] = [
        NAME,
        Column("loss variance", lambda v: mean_sd(v.stability.loss_variance, 5)),
        Column("gradient norm", lambda v: mean_sd(v.stability.gradient_norm, 3)),
        Column(
            "its coefficient of variation",
            lambda v: mean_sd(v.stability.gradient_norm_variation, 3),
        ),
        Column(
            "spikes, in records", lambda v: f"{v.stability.spikes:,} in {v.stability.records:,}"
        ),
    ]
    return table_of(comparison.variants, columns)


@dataclass(frozen=True)
class Measure:
    """Row of the cost table: the measured number and, where there is a formula, the expected one.

    Attributes:
        title: Title of the row.
        field: Dotted path of the number in `Cost`, and of the expected one in `Theory`.
        show: Function that returns the number as text.
        digits: Digits of the median and quartiles, where the cost table shows these.
        formula: Dotted path of an expected number of another unit, of which the ratio is shown.
        by_chance: Whether company on the machine, or an allocator, moves the number by more than a
            variant does: its distance to the baseline is not shown.
    """

    title: str
    field: str
    show: Callable[[float | None], str] = byte_count
    digits: int | None = None
    formula: str = ""
    by_chance: bool = False


def cost_table(comparison: Comparison, stratum: str) -> Table:
    """Return a table of measures by variants, with values by formula below measured ones.

    Args:
        stratum: Values of the subject of the variants that are shown.
    """
    variants = [variant for variant in comparison.variants if variant.stratum == stratum]
    pairs = [(variant, comparison.base_of(variant)) for variant in variants]
    rows: list[tuple[str, ...]] = []
    for measure in MEASURES:
        title = measure.title
        formula = measure.formula or measure.field
        if any(_number(variant.cost, measure.field) is not None for variant in variants):
            cells = [_measured(measure, variant, base, measure.digits) for variant, base in pairs]
            rows.append((title, *cells))
        if any(_number(variant.theory, formula) is not None for variant in variants):
            title = "· by formula" if rows and rows[-1][0] == title else f"{title}, by formula"
            rows.append((title, *(_expected(measure, variant, base) for variant, base in pairs)))
    return Table(("", *(variant.label for variant in variants)), rows)


def _measured(measure: Measure, variant: Variant, base: Variant, digits: int | None = None) -> str:
    """Return the measured number; where `digits` are given, the median with its quartiles."""
    value = _number(variant.cost, measure.field)
    text = measure.show(value)
    if digits is not None and value is not None:
        spread: Quartiles = getattr(variant.cost, measure.field)
        ends = f"[{number(spread.low, digits)}, {number(spread.high, digits)}]"
        text = f"{number(spread.median, digits)} {ends}"
    if measure.by_chance:
        return text
    return text + _change(variant, value, _number(base.cost, measure.field))


def _expected(measure: Measure, variant: Variant, base: Variant) -> str:
    field = measure.formula or measure.field
    value = _number(variant.theory, field)
    text = "" if measure.formula else measure.show(value)
    return (text + _change(variant, value, _number(base.theory, field))).strip() or NOTHING


def _number(record: Cost | Theory | None, field: str) -> float | None:
    """Return the number at a dotted path, of quartiles the median; None where there is none."""
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
    header = ("variant", "seed", "validation loss", "perplexity", "run")
    return Table(header, rows, text_columns=(0, 4))


def _count(value: float | None) -> str:
    return number(value, 0)


def _percentage(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


SPEED = Measure("tokens/s", "tokens_per_second", _count, digits=0, by_chance=True)
TRAINABLE = Measure("trainable parameters", "size.trainable_parameters", _count)
FROZEN = Measure("frozen parameters", "size.frozen_parameters", _count)
CHECKPOINT = Measure("checkpoint", "states.checkpoint_bytes")
MEASURES = (
    TRAINABLE,
    FROZEN,
    Measure("FLOPs per token", "executed_flops_per_token", _count),
    Measure(
        "step time, s",
        "step_seconds",
        number,
        digits=4,
        formula="executed_flops_per_token",
        by_chance=True,
    ),
    SPEED,
    Measure("MFU", "mfu", _percentage, by_chance=True),
    Measure("HFU", "hfu", _percentage, by_chance=True),
    Measure("weights that train", "states.weight_bytes"),
    Measure("frozen bank", "states.frozen_bytes"),
    Measure("gradients", "states.gradient_bytes"),
    Measure("optimizer state", "states.optimizer_state_bytes"),
    Measure("these four together", "states.in_memory"),
    Measure("peak memory of a device", "peak_device_bytes"),
    Measure("peak memory of a host process", "peak_host_bytes", by_chance=True),
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
