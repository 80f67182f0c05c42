"""Numbers of a comparison for programs: comparison.json.

Every number is a field of the dataclasses of a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.trend import Trend
from pretrain.study.gaps import PairedGap, gap_content

_SLOPE_KEYS = ("n", "mean", "sd", "low", "high", "t", "t_p", "t_p_holm", "significance_claimed")


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the content of comparison.json."""
    return {
        "baseline": comparison.baseline,
        "subjects": list(comparison.subjects),
        "match": comparison.match,
        "variants": [_variant_fields(variant) for variant in comparison.variants],
        "trends": [_trend_fields(trend) for trend in comparison.trends],
        "notes": list(comparison.notes),
    }


def _variant_fields(variant: Variant) -> dict[str, Any]:
    fields = _inlined(asdict(replace(variant, runs=()))) | {"runs": _runs(variant)}
    if variant.gap is not None:
        within = {"equivalent_within": variant.gap.equivalent_within}
        fields["gap"] = gap_content(variant.gap) | within
    fields |= {
        "validation_bits_per_byte": variant.loss_bits,
        "gap_bits_per_byte": variant.gap_bits,
        "gap_of_context": variant.gap_of_context,
    }
    if variant.compute is not None:
        fields["compute"] = asdict(variant.compute) | {"gap": _content(variant.compute.gap)}
    fields["source_gaps"] = {key: _content(gap) for key, gap in variant.source_gaps.items()}
    return fields


def _content(gap: PairedGap | None) -> dict[str, Any] | None:
    return gap_content(gap) if gap else None


def _trend_fields(trend: Trend) -> dict[str, Any]:
    """Return a trend; of its slope, the statistics and each seed's own."""
    slope = trend.slope
    by_seed = {str(seed): value for seed, value in zip(slope.seeds, slope.differences, strict=True)}
    kept = {key: getattr(slope, key) for key in _SLOPE_KEYS}
    return asdict(trend) | {"slope": kept | {"by_seed": by_seed}}


def _runs(variant: Variant) -> list[dict[str, Any]]:
    """Return facts and results of every run."""
    return [
        {"name": run.name, "variant": variant.name, "seed": run.seed, "path": str(run.path)}
        | asdict(run.result)
        for run in variant.runs
    ]


def _inlined(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with the fields of ModelSize and StateBytes in their place."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        inner = _inlined(value) if isinstance(value, Mapping) else value
        fields |= inner if key in ("size", "states") else {key: inner}
    return fields
