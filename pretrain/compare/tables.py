"""The tables of a comparison, for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.cost import Cost, Quartiles
from pretrain.compare.text import NOT_FINITE, quartile_text
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
from pretrain.study.tables import margin, p_value, verdict


def validation_table(comparison: Comparison) -> Table:
    """Loss and perplexity of each variant, over all sources and by source."""
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


def _mean_or_diverged(value: Spread | None, digits: int) -> str:
    return mean_sd(value, digits, missing=NOT_FINITE)


def _over_unigram(variant: Variant) -> str:
    if variant.validation_perplexity is None:
        return NOTHING
    return number(variant.validation_perplexity.mean / variant.runs[0].result.unigram_perplexity, 3)


def gap_table(comparison: Comparison) -> Table:
    """Each variant's paired gap, its interval, effect size and tests."""
    rows = []
    for variant in _others(comparison):
        gap = variant.gap
        if gap is None:
            rows.append((variant.name, "0", *[NOTHING] * 9, verdict(None)))
            continue
        rows.append(
            (
                variant.name,
                str(gap.n),
                signed(gap.mean),
                interval(gap.low, gap.high),
                percent(gap.perplexity_ratio),
                NOTHING if gap.equivalent_within is None else f"±{margin(gap)}",
                signed(gap.cohens_dz, 2),
                p_value(gap.t_p, gap.n),
                p_value(gap.t_p_holm, gap.n),
                p_value(gap.wilcoxon_p, gap.n),
                p_value(gap.wilcoxon_p_holm, gap.n),
                verdict(gap),
            )
        )
    header = (
        "variant",
        "pairs",
        "gap, nats/token",
        "95 % interval",
        "perplexity",
        "lies within",
        "d_z",
        "t-test p",
        "by Holm",
        "Wilcoxon p",
        "by Holm",
        "what may be said",
    )
    return Table(header, rows, text_columns=(0, len(header) - 1))


def source_gap_table(comparison: Comparison) -> Table:
    """The gap on each source with its interval; nothing is tested here."""
    rows = []
    for variant in _others(comparison):
        cells = []
        for source in comparison.sources:
            gap = variant.source_gaps.get(source)
            cells.append(NOTHING if gap is None else f"{signed(gap.mean)} {interval(gap.low, gap.high)}")
        rows.append((variant.name, *cells))
    return Table(("variant", *comparison.sources), rows)


def convergence_table(comparison: Comparison) -> Table:
    """Steps and tokens to the loss that the baseline had at each share of its tokens."""
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
    """Loss variance, gradient norm and its spikes."""
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
    """A row of the cost table: what was measured and, where a formula has it, what it should be.

    The functions give a number, or None where there is none; `cell` shows what was measured.
    """

    title: str
    measured: Callable[[Variant], float | None]
    expected: Callable[[Variant], float | None]
    show: Callable[[float | None], str]
    cell: Callable[[Variant], str] | None = None
    ratio_only: bool = False


def cost_table(comparison: Comparison, stratum: str) -> Table:
    """Measures down, variants of one stratum across; below a measured row, the same by formula."""
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
    """The distance to the baseline, in parentheses."""
    if variant.is_baseline or value is None or not base or value == base:
        return ""
    return f" ({percent(value / base)})"


def runs_table(comparison: Comparison) -> Table:
    """Every run with its result."""
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


def _others(comparison: Comparison) -> Sequence[Variant]:
    return [variant for variant in comparison.variants if not variant.is_baseline]


def _median(value: Quartiles | None) -> float | None:
    return None if value is None else value.median


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


def _by_count(title: str, of: Callable[[Cost | Theory], int], show: Callable[[float | None], str]) -> Measure:
    """A measure that is counted and has a formula."""
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
        lambda variant: quartile_text(variant.cost.step_seconds, 4),
        ratio_only=True,
    ),
    Measure(
        "tokens/s",
        lambda variant: _median(variant.cost.tokens_per_second),
        _none,
        _count,
        lambda variant: quartile_text(variant.cost.tokens_per_second, 0),
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
