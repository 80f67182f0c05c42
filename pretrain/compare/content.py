"""Numbers of a comparison for programs: comparison.json, variants.csv and runs.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.trend import Trend
from pretrain.study.gaps import TEST_KEYS, gap_content

_GAP_KEYS = ("mean", "sd", "low", "high", "perplexity_ratio", "equivalent_within", *TEST_KEYS)


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


def variants_csv(comparison: Comparison) -> str:
    """Return one line for each variant: everything that is one number."""
    return _csv([_variant_row(variant) for variant in comparison.variants])


def runs_csv(comparison: Comparison) -> str:
    """Return one line for each run, with one column for each source."""
    return _csv([_run_row(run) for run in _runs(comparison.variants)])


def _variant_fields(variant: Variant) -> dict[str, Any]:
    fields = _fields(replace(variant, runs=())) | {"runs": _runs([variant])}
    if variant.gap is not None:
        fields["gap"] = gap_content(variant.gap) | {
            "equivalent_within": variant.gap.equivalent_within
        }
    fields |= _beside(variant)
    if variant.compute is not None:
        gap = variant.compute.gap
        fields["compute"] = asdict(variant.compute) | {"gap": gap_content(gap) if gap else None}
    sources = variant.source_gaps.items()
    fields["source_gaps"] = {source: gap_content(gap) if gap else None for source, gap in sources}
    return fields


def _beside(variant: Variant) -> dict[str, float | None]:
    """Return the gap in other units, and the loss."""
    gap = variant.gap.mean if variant.gap else None
    loss = variant.validation_loss.mean if variant.validation_loss else None
    return {
        "validation_bits_per_byte": variant.bits_per_byte(loss),
        "gap_bits_per_byte": variant.bits_per_byte(gap),
        "gap_of_context": variant.of_context(gap),
    }


def _trend_fields(trend: Trend) -> dict[str, Any]:
    """Return a trend; of its slope, the statistics and each seed's own."""
    slope = trend.slope
    kept = {
        key: getattr(slope, key)
        for key in ("n", "mean", "sd", "low", "high", "t", "t_p", "t_p_holm")
    }
    by_seed = {str(seed): value for seed, value in zip(slope.seeds, slope.differences, strict=True)}
    return _fields(trend) | {
        "slope": kept | {"significance_claimed": slope.significance_claimed, "by_seed": by_seed}
    }


def _runs(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return the facts and results of every run, variant by variant."""
    return [
        {"name": run.name, "variant": variant.name, "seed": run.seed, "path": str(run.path)}
        | _fields(run.result)
        for variant in variants
        for run in variant.runs
    ]


def _fields(record: Any) -> dict[str, Any]:
    """Return a dataclass as a mapping, with the fields of ModelSize and StateBytes in their place."""
    return _inlined(asdict(record))


def _inlined(values: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in values.items():
        inner = _inlined(value) if isinstance(value, Mapping) else value
        fields |= inner if key in ("size", "states") else {key: inner}
    return fields


def _variant_row(variant: Variant) -> dict[str, Any]:
    row: dict[str, Any] = {
        "variant": variant.name,
        "label": variant.label,
        "stratum": variant.stratum,
        "baseline": variant.baseline,
        "runs": len(variant.runs),
    }
    for name, value in (
        ("validation_loss", variant.validation_loss),
        ("validation_perplexity", variant.validation_perplexity),
        *(
            (f"perplexity.{source}", value)
            for source, value in variant.perplexity_by_source.items()
        ),
        ("loss_variance", variant.stability.loss_variance),
        ("gradient_norm", variant.stability.gradient_norm),
        ("gradient_norm_variation", variant.stability.gradient_norm_variation),
    ):
        row |= {
            f"{name}.mean": value.mean if value else None,
            f"{name}.sd": value.sd if value else None,
        }
    row["spikes"] = variant.stability.spikes
    row["gap.pairs"] = variant.gap.n if variant.gap else 0
    row |= {f"gap.{key}": getattr(variant.gap, key, None) for key in _GAP_KEYS}
    for reach in variant.reaches:
        at = f"to_{reach.fraction:.0%}"
        row |= {f"{at}.reached": reach.reached, f"{at}.pairs": reach.pairs}
        row[f"{at}.steps"] = reach.steps.mean if reach.steps else None
        row[f"{at}.tokens"] = reach.tokens.mean if reach.tokens else None
    row |= _flat(_fields(variant.cost), "cost")
    row |= _flat(_fields(variant.theory), "theory") if variant.theory else {}
    row |= _beside(variant)
    if variant.compute is None:
        return row
    gap = {key: getattr(variant.compute.gap, key, None) for key in ("mean", "low", "high")}
    return row | _flat(asdict(variant.compute) | {"gap": gap}, "compute")


def _run_row(run: Mapping[str, Any]) -> dict[str, Any]:
    sources = run["perplexity_by_source"]
    row = {key: value for key, value in run.items() if key != "perplexity_by_source"}
    return row | {f"perplexity.{source}": value for source, value in sources.items()}


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return {prefix.key: number} of a mapping and of the mappings in it."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}.{key}")
            if isinstance(value, Mapping)
            else {f"{prefix}.{key}": value}
        )
    return flat


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows under the union of their columns, in order of first appearance; missing cells are empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
