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
Show = Callable[[float | None], str]


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
    columns: tuple[tuple[str, Callable[[Cost], float | None], Show], ...] = (
        ("tokens/s", lambda cost: _median(cost.tokens_per_second), _count),
        ("trainable\nparameters", lambda cost: cost.size.trainable_parameters, _count),
        ("frozen\nparameters", lambda cost: cost.size.frozen_parameters, _count),
        (
            "gradients +\noptimizer state",
            lambda cost: cost.states.gradient_bytes + cost.states.optimizer_state_bytes,
            byte_count,
        ),
        ("checkpoint", lambda cost: cost.states.checkpoint_bytes, byte_count),
    )
    rows = []
    for variant in comparison.variants:
        base = comparison.variant(variant.baseline)
        cells = [
            show(of(variant.cost)) + cost_change(variant, of(variant.cost), of(base.cost))
            for _, of, show in columns
        ]
        rows.append([_in_lines(variant), *(cell.replace(" (", "\n(", 1) for cell in cells)])
    return Table(("variant", *(title for title, _, _ in columns)), rows)


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

    The functions return a number, or None where there is none; `cell` shows the measured one.
    """

    title: str
    measured: Callable[[Variant], float | None]
    expected: Callable[[Variant], float | None]
    show: Show
    cell: Callable[[Variant], str] | None = None
    ratio_only: bool = False


def cost_table(comparison: Comparison, stratum: str) -> Table:
    """Return measures down, variants of one stratum across; below a measured row, the same by formula."""
    variants = [variant for variant in comparison.variants if variant.stratum == stratum]
    rows: list[tuple[str, ...]] = []
    for measure in MEASURES:
        bases = [comparison.variant(variant.baseline) for variant in variants]
        measured = [measure.measured(variant) for variant in variants]
        if any(value is not None for value in measured):
            cells = [
                (measure.show(value) if measure.cell is None else measure.cell(variant))
                + cost_change(variant, value, measure.measured(base))
                for variant, value, base in zip(variants, measured, bases, strict=True)
            ]
            rows.append((measure.title, *cells))
        expected = [measure.expected(variant) for variant in variants]
        if any(value is not None for value in expected):
            cells = [
                ("" if measure.ratio_only else measure.show(value))
                + cost_change(variant, value, measure.expected(base))
                for variant, value, base in zip(variants, expected, bases, strict=True)
            ]
            title = (
                "· by formula" if rows and rows[-1][0] == measure.title else f"{measure.title}, by formula"
            )
            rows.append((title, *(cell.strip() or NOTHING for cell in cells)))
    return Table(("", *(variant.label for variant in variants)), rows)


def cost_change(variant: Variant, value: float | None, base: float | None) -> str:
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


def _none(variant: Variant) -> None:
    return None


def _states(variant: Variant) -> float:
    return variant.cost.states.in_memory


def _expected_states(variant: Variant) -> float | None:
    return variant.theory.states.in_memory if variant.theory else None


def _flops(variant: Variant) -> float | None:
    return variant.theory.executed_flops_per_token if variant.theory else None


def _by_count(title: str, of: Callable[[Cost | Theory], int], show: Show) -> Measure:
    """Return a measure that is counted and has a formula."""
    return Measure(
        title,
        measured=lambda variant: of(variant.cost),
        expected=lambda variant: of(variant.theory) if variant.theory else None,
        show=show,
    )


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


MEASURES: tuple[Measure, ...] = (
    _by_count("trainable parameters", lambda cost: cost.size.trainable_parameters, _count),
    _by_count("frozen parameters", lambda cost: cost.size.frozen_parameters, _count),
    Measure("FLOPs per token", _none, _flops, _count),
    Measure(
        "step time, s",
        lambda variant: _median(variant.cost.step_seconds),
        _flops,
        lambda value: number(value, 4),
        lambda variant: _quartile_text(variant.cost.step_seconds, 4),
        ratio_only=True,
    ),
    Measure(
        "tokens/s",
        lambda variant: _median(variant.cost.tokens_per_second),
        _none,
        _count,
        lambda variant: _quartile_text(variant.cost.tokens_per_second, 0),
    ),
    Measure("MFU", lambda variant: _median(variant.cost.mfu), _none, _share),
    Measure("HFU", lambda variant: _median(variant.cost.hfu), _none, _share),
    _by_count("weights that train", lambda cost: cost.states.weight_bytes, byte_count),
    _by_count("frozen bank", lambda cost: cost.states.frozen_bytes, byte_count),
    _by_count("gradients", lambda cost: cost.states.gradient_bytes, byte_count),
    _by_count("optimizer state", lambda cost: cost.states.optimizer_state_bytes, byte_count),
    Measure("these four together", _states, _expected_states, byte_count),
    Measure("peak memory of a device", lambda variant: variant.cost.peak_device_bytes, _none, byte_count),
    Measure("peak memory of a host process", lambda variant: variant.cost.peak_host_bytes, _none, byte_count),
    _by_count("checkpoint", lambda cost: cost.states.checkpoint_bytes, byte_count),
)
