"""The tables of a comparison, as text grids for the report and the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.cost import Quartiles
from pretrain.compare.significance import Spread
from pretrain.compare.text import (
    NOTHING,
    Grid,
    byte_count,
    interval,
    mean_sd,
    number,
    p_value,
    percent,
    quartile_text,
    share,
    signed,
    verdict,
)


def validation_grid(comparison: Comparison) -> Grid:
    """Loss and perplexity of each variant, over all sources and by source."""
    sources = comparison.sources if len(comparison.sources) > 1 else ()
    rows = [
        (
            variant.name,
            str(len(variant.runs)),
            mean_sd(variant.validation_loss),
            mean_sd(variant.validation_perplexity, 2),
            _over_unigram(variant),
            *(mean_sd(variant.perplexity_by_source.get(source), 2) for source in sources),
        )
        for variant in comparison.variants
    ]
    header = ("variant", "n", "validation loss", "perplexity", "perplexity / unigram")
    return Grid((*header, *(f"perplexity: {source}" for source in sources)), tuple(rows))


def _over_unigram(variant: Variant) -> str:
    if variant.validation_perplexity is None:
        return NOTHING
    return number(variant.validation_perplexity.mean / variant.runs[0].unigram_perplexity, 3)


def gap_grid(comparison: Comparison) -> Grid:
    """Each variant's paired gap, its interval, effect size and tests."""
    rows = []
    for variant in _others(comparison):
        gap = variant.gap
        if gap is None:
            rows.append((variant.name, "0", *[NOTHING] * 8, verdict(None)))
            continue
        rows.append(
            (
                variant.name,
                str(gap.n),
                signed(gap.mean),
                interval(gap.low, gap.high),
                percent(gap.perplexity_ratio),
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
        "d_z",
        "t-test p",
        "by Holm",
        "Wilcoxon p",
        "by Holm",
        "what may be said",
    )
    return Grid(header, tuple(rows))


def source_gap_grid(comparison: Comparison) -> Grid:
    """The gap on each source with its interval; nothing is tested here."""
    rows = []
    for variant in _others(comparison):
        cells = []
        for source in comparison.sources:
            gap = variant.source_gaps.get(source)
            cells.append(NOTHING if gap is None else f"{signed(gap.mean)} {interval(gap.low, gap.high)}")
        rows.append((variant.name, *cells))
    return Grid(("variant", *comparison.sources), tuple(rows))


def convergence_grid(comparison: Comparison) -> Grid:
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
    return Grid(("variant", *fractions), tuple(rows))


def stability_grid(comparison: Comparison) -> Grid:
    """Loss variance, gradient norm and its spikes."""
    rows = []
    for variant in comparison.variants:
        stability = variant.stability
        rows.append(
            (
                variant.name,
                _spread_or_dash(stability.loss_variance, 5),
                _spread_or_dash(stability.gradient_norm, 3),
                _spread_or_dash(stability.gradient_norm_variation, 3),
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
    return Grid(header, tuple(rows))


def _spread_or_dash(value: Spread | None, digits: int) -> str:
    return NOTHING if value is None else mean_sd(value, digits)


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


def cost_grid(comparison: Comparison, stratum: str) -> Grid:
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
    return Grid(("", *(variant.label for variant in variants)), tuple(rows))


def cost_change(variant: Variant, value: float | None, base: float | None) -> str:
    """The distance to the baseline, in parentheses."""
    if variant.is_baseline or value is None or not base or value == base:
        return ""
    return f" ({percent(value / base)})"


def runs_grid(comparison: Comparison) -> Grid:
    """Every run with its result."""
    rows = [
        (
            run.variant,
            str(run.seed),
            number(run.validation_loss),
            number(run.validation_perplexity, 2),
            run.path,
        )
        for run in comparison.runs
    ]
    return Grid(("variant", "seed", "validation loss", "perplexity", "run"), tuple(rows))


def _others(comparison: Comparison) -> Sequence[Variant]:
    return [variant for variant in comparison.variants if not variant.is_baseline]


def _median(value: Quartiles | None) -> float | None:
    return None if value is None else value.median


def _count(value: float | None) -> str:
    return number(value, 0)


def _none(variant: Variant) -> None:
    return None


def _states(variant: Variant) -> float:
    cost = variant.cost
    return cost.weight_bytes + cost.frozen_bytes + cost.gradient_bytes + cost.optimizer_state_bytes


def _expected_states(variant: Variant) -> float | None:
    theory = variant.theory
    if theory is None:
        return None
    return theory.weight_bytes + theory.frozen_bytes + theory.gradient_bytes + theory.optimizer_state_bytes


def _flops(variant: Variant) -> float | None:
    return variant.theory.executed_flops_per_token if variant.theory else None


def _by_count(title: str, field: str, show: Callable[[float | None], str]) -> Measure:
    """A measure that `Cost` and `Theory` both have under the name `field`."""
    return Measure(
        title,
        measured=lambda variant: getattr(variant.cost, field),
        expected=lambda variant: getattr(variant.theory, field) if variant.theory else None,
        show=show,
    )


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


MEASURES: tuple[Measure, ...] = (
    _by_count("trainable parameters", "trainable_parameters", _count),
    _by_count("frozen parameters", "frozen_parameters", _count),
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
    _by_count("weights that train", "weight_bytes", byte_count),
    _by_count("frozen bank", "frozen_bytes", byte_count),
    _by_count("gradients", "gradient_bytes", byte_count),
    _by_count("optimizer state", "optimizer_state_bytes", byte_count),
    Measure("these four together", _states, _expected_states, byte_count),
    Measure("peak memory of a device", lambda variant: variant.cost.peak_device_bytes, _none, byte_count),
    Measure("peak memory of a host process", lambda variant: variant.cost.peak_host_bytes, _none, byte_count),
    _by_count("checkpoint", "checkpoint_bytes", byte_count),
)
