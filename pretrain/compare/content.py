"""Numbers of a comparison for programs: comparison.json, variants.csv and runs.csv.

Every number is a field of the dataclasses of a comparison; variants.csv has those of
comparison.json that are one number.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.trend import Trend
from pretrain.study.gaps import TEST_KEYS, PairedGap, gap_content

_GAP_KEYS = ("mean", "sd", "low", "high", "perplexity_ratio", "equivalent_within", *TEST_KEYS)
_SLOPE_KEYS = ("n", "mean", "sd", "low", "high", "t", "t_p", "t_p_holm", "significance_claimed")
_NOISE = ("loss_variance", "gradient_norm", "gradient_norm_variation")


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
    return _csv([_variant_row(_variant_fields(variant)) for variant in comparison.variants])


def runs_csv(comparison: Comparison) -> str:
    """Return one line for each run, with one column for each source."""
    rows = []
    for row in (row for variant in comparison.variants for row in _runs(variant)):
        sources = row.pop("perplexity_by_source")
        rows.append(row | {f"perplexity.{source}": value for source, value in sources.items()})
    return _csv(rows)


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


def _variant_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of variants.csv from the fields of comparison.json."""
    row = {"variant": fields["name"]}
    row |= {key: fields[key] for key in ("label", "stratum", "baseline")}
    row["runs"] = len(fields["runs"])
    spreads = {key: fields[key] for key in ("validation_loss", "validation_perplexity")}
    spreads |= {f"perplexity.{key}": own for key, own in fields["perplexity_by_source"].items()}
    spreads |= {key: fields["stability"][key] for key in _NOISE}
    for name, spread in spreads.items():
        row |= _picked(spread, name, ("mean", "sd"))
    row["spikes"] = fields["stability"]["spikes"]
    row["gap.pairs"] = len(fields["gap"]["seeds"]) if fields["gap"] else 0
    row |= _picked(fields["gap"], "gap", _GAP_KEYS)
    for reach in fields["reaches"]:
        at = f"to_{reach['fraction']:.0%}"
        row |= _picked(reach, at, ("reached", "pairs"))
        row |= {f"{at}.{key}": (reach[key] or {}).get("mean") for key in ("steps", "tokens")}
    row |= _flat(fields["cost"], "cost")
    row |= _flat(fields["theory"] or {}, "theory")
    for key in ("validation_bits_per_byte", "gap_bits_per_byte", "gap_of_context"):
        row[key] = fields[key]
    if compute := fields["compute"]:
        gap = compute["gap"] or {}
        row |= _flat(
            compute | {"gap": {key: gap.get(key) for key in ("mean", "low", "high")}}, "compute"
        )
    return row


def _picked(values: Mapping[str, Any] | None, name: str, keys: Sequence[str]) -> dict[str, Any]:
    return {f"{name}.{key}": (values or {}).get(key) for key in keys}


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return {prefix.key: number} of a mapping and of the mappings in it."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        flat |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows under the union of their columns, in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
