"""What a comparison says first: quality, then speed and memory, then the cost at equal FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.compute import BASELINE_LENGTHS, VALIDATIONS, Ratio
from pretrain.compare.trend import trend_sentence
from pretrain.reporting.text import percent, share
from pretrain.study.gaps import CONFIDENCE, FEWEST_SEEDS, PairedGap
from pretrain.study.tables import gap_sentence

_BY = {
    BASELINE_LENGTHS: ", by the baseline's slope",
    VALIDATIONS: ", by the runs' own validations, which flatter a cheaper variant",
}


def in_short(comparison: Comparison) -> list[str]:
    """Return the sentences below "In short": results first, then what a reader must know.

    Where a line is drawn over the subject, each variant is there at its last value alone.
    """
    shown = comparison.others
    if comparison.trends:
        shown = tuple({variant.label: variant for variant in shown}.values())
    left = len(comparison.others) - len(shown)
    return [
        *(gap_sentence(variant.name, variant.gap) for variant in shown),
        *map(trend_sentence, comparison.trends),
        *([f"{left} more gaps, at other values, are in the tables below."] if left else []),
        *_speed(comparison, shown),
        *_costs(comparison, shown),
        *comparison.seals,
        *comparison.notes,
    ]


def _speed(comparison: Comparison, shown: Sequence[Variant]) -> list[str]:
    """Return speed and peak memory of the variants whose pairs were measured side by side."""
    said = [
        f"{variant.name}: a token took {_ratio(variant.speed)} of the seconds that it took "
        f"{variant.baseline}, {len(variant.runs)} pairs of runs side by side"
        f"{_peak(comparison, variant)}."
        for variant in shown
        if variant.speed
    ]
    others = [variant.name for variant in shown if not variant.speed]
    if others:
        of = f" of {', '.join(others)}" if said else ""
        said.append(
            f"Speed and peak memory{of} were not measured side by side, which takes "
            f"{FEWEST_SEEDS} pairs of runs on one machine, each pair without a pause: "
            "benchmarks/step/measure.py measures a ratio."
        )
    return said


def _ratio(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"× {ratio.mean:.3f}"
    return f"× {ratio.mean:.3f} ({share(CONFIDENCE)} interval {ratio.low:.3f} to {ratio.high:.3f})"


def _peak(comparison: Comparison, variant: Variant) -> str:
    """Return the peak of a device; that of a host process is an accident of its allocator."""
    own, base = (one.cost.peak_device_bytes for one in (variant, comparison.base_of(variant)))
    return f"; peak memory of a device {percent(own / base)}" if own and base else ""


def _costs(comparison: Comparison, shown: Sequence[Variant]) -> list[str]:
    return [
        f"{variant.name}: {'; '.join(parts)}."
        for variant in shown
        if (parts := [*_at_equal_flops(comparison, variant), *_counted(comparison, variant)])
    ]


def _at_equal_flops(comparison: Comparison, variant: Variant) -> list[str]:
    """Return the gap at equal FLOPs, unless that is the report's own gap or is not known."""
    compute = variant.compute
    if compute is None or compute.gap is None or comparison.match != "tokens":
        return []
    return [f"at equal FLOPs {_size(compute.gap)}{_BY.get(compute.curve or '', '')}"]


def _size(gap: PairedGap) -> str:
    scale = gap.scale
    ends = f" {scale.interval(gap)}" if gap.low is not None else ""
    ratio = percent(gap.perplexity_ratio)
    return f"{scale.signed(gap.mean)} {scale.unit}{ends}, perplexity {ratio}"


def _counted(comparison: Comparison, variant: Variant) -> list[str]:
    """Return FLOPs and bytes of the model states, which no clock decides."""
    base = comparison.base_of(variant)
    parts = []
    if variant.theory and base.theory:
        flops = variant.theory.executed_flops_per_token / base.theory.executed_flops_per_token
        parts.append(f"FLOPs of a token {percent(flops)}")
    states = variant.cost.states.in_memory / base.cost.states.in_memory
    return [" and ".join([*parts, f"bytes of the model states {percent(states)}, counted"])]
