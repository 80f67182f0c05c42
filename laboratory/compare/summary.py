"""The sentences of a comparison below "In short": quality, speed, cost, seals, notes."""

from __future__ import annotations

from collections.abc import Sequence

from laboratory.compare.comparison import Comparison, Variant
from laboratory.compare.compute import BASELINE_LENGTHS, VALIDATIONS, Ratio
from laboratory.compare.trend import trend_sentence
from laboratory.study.gaps import CONFIDENCE, FEWEST_SEEDS, PairedGap
from laboratory.study.tables import gap_sentence
from pretrain.reporting.text import percent, share

_BY = {
    BASELINE_LENGTHS: ", by the baseline's slope",
    VALIDATIONS: ", by the runs' own validations, which flatter a cheaper variant",
}
"""Source of the gap at equal FLOPs, where its learning curves are not of several lengths."""


def in_short(comparison: Comparison) -> list[str]:
    """Return the sentences below "In short": results first, then notes.

    Where a line is drawn over the subject, each variant is there at its last value alone. Below
    FEWEST_SEEDS pairs of every variant, quality, cost and how sure both are have one sentence each.
    """
    shown = comparison.others
    if comparison.has_few_pairs and not comparison.trends:
        return [*_few_pairs(comparison), *comparison.seals, *comparison.notes]
    if comparison.trends:
        # Later variants of a label replace earlier ones: the last value of the subject stays.
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


def _few_pairs(comparison: Comparison) -> list[str]:
    gaps = [(variant, variant.gap) for variant in comparison.others]
    quality = "; ".join(
        f"{variant.name} {_size(gap)}, against {gap.baseline}"
        if gap
        else f"{variant.name} has no seed in common with the baseline, so no gap"
        for variant, gap in gaps
    )
    costs = [*_costs(comparison, comparison.others), *_speed(comparison, comparison.others)]
    sizes = " and ".join(map(str, sorted({gap.n if gap else 0 for _, gap in gaps})))
    return [
        f"Quality (+ is worse): {quality}.",
        f"Cost: {' '.join(costs)}",
        f"How sure: n = {sizes}, and below {FEWEST_SEEDS} pairs of seeds significance is not "
        "claimed. Other seeds or more tokens may turn the result round.",
    ]


def _speed(comparison: Comparison, shown: Sequence[Variant]) -> list[str]:
    """Return speed and peak memory of the variants whose pairs were measured side by side."""
    sentences = [
        f"{variant.name}: a token took {_ratio(variant.speed)} of the seconds that it took "
        f"{variant.baseline}, {len(variant.runs)} pairs of runs side by side"
        f"{_peak(comparison, variant)}."
        for variant in shown
        if variant.speed
    ]
    unmeasured = [variant.name for variant in shown if not variant.speed]
    if unmeasured:
        which = f" of {', '.join(unmeasured)}" if sentences else ""
        sentences.append(
            f"Speed and peak memory{which} were not measured side by side, which takes "
            f"{FEWEST_SEEDS} pairs of runs on one machine, each pair without a pause: "
            "benchmarks/step/measure.py measures a ratio."
        )
    return sentences


def _ratio(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"× {ratio.mean:.3f}"
    return f"× {ratio.mean:.3f} ({share(CONFIDENCE)} interval {ratio.low:.3f} to {ratio.high:.3f})"


def _peak(comparison: Comparison, variant: Variant) -> str:
    """Return the peak of a device; that of a host process is an accident of its allocator."""
    peak, base_peak = (
        side.cost.peak_device_bytes for side in (variant, comparison.base_of(variant))
    )
    return f"; peak memory of a device {percent(peak / base_peak)}" if peak and base_peak else ""


def _costs(comparison: Comparison, shown: Sequence[Variant]) -> list[str]:
    return [
        f"{variant.name}: {'; '.join(parts)}."
        for variant in shown
        if (parts := [*_at_equal_flops(comparison, variant), *_counted(comparison, variant)])
    ]


def _at_equal_flops(comparison: Comparison, variant: Variant) -> list[str]:
    """Return the gap at equal FLOPs, where it is known and not the report's own gap."""
    compute = variant.compute
    if compute is None or compute.gap is None or comparison.match != "tokens":
        return []
    past = " (past the end of the baseline's curve)" if compute.gap_beyond else ""
    return [f"at equal FLOPs {_size(compute.gap)}{past}{_BY.get(compute.curve or '', '')}"]


def _size(gap: PairedGap) -> str:
    scale = gap.scale
    ends = f" {scale.interval(gap)}" if gap.low is not None else ""
    ratio = percent(gap.perplexity_ratio)
    return f"{scale.signed(gap.mean)} {scale.unit}{ends}, perplexity {ratio}"


def _counted(comparison: Comparison, variant: Variant) -> list[str]:
    """Return FLOPs and bytes of the model states, which are counted, not timed."""
    base = comparison.base_of(variant)
    parts = []
    if variant.theory and base.theory:
        flops = variant.theory.executed_flops_per_token / base.theory.executed_flops_per_token
        parts.append(f"FLOPs of a token {percent(flops)}")
    states = variant.cost.states.in_memory / base.cost.states.in_memory
    return [" and ".join([*parts, f"bytes of the model states {percent(states)}, counted"])]
