"""Compares finished runs, read from disk only, with one of them as the baseline.

Runs that did not see the same data, length and shape of model are not comparable and are refused. Whatever
else differs in their settings (a learning rate, a device) is listed beside the table. One row is one run,
one seed: no statistics over seeds are made here and no significance is claimed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.finished_run import FinishedRun, read_finished_run

GAP_FIELDS = (
    "validation_perplexity",
    "tokens_per_second",
    "trainable_parameters",
    "frozen_parameters",
    "gradient_and_optimizer_bytes",
    "checkpoint_bytes",
)

# Settings that name or place a run, or are what is being compared; everything else that differs is reported.
_EXPECTED_TO_DIFFER = (
    "run.name",
    "run.directory",
    "attention.",
    "data.directory",
    "data.cache_directory",
    "data.loader_workers",
    "data.allow_change",
)


@dataclass(frozen=True)
class ComparedRun:
    """One row. `gaps` holds value / baseline's value - 1 for each of GAP_FIELDS; None where there is none."""

    name: str
    variant: str
    seed: int
    path: Path
    validation_loss: float | None
    validation_perplexity: float | None
    perplexity_by_source: Mapping[str, float | None]
    perplexity_over_unigram: float | None
    tokens_per_second: float | None
    trainable_parameters: int
    frozen_parameters: int
    gradient_and_optimizer_bytes: int
    checkpoint_bytes: int
    gaps: Mapping[str, float | None]


@dataclass(frozen=True)
class Comparison:
    """`runs` has the baseline first, then the others in the order given. `notes` are sentences."""

    baseline: str
    runs: tuple[ComparedRun, ...]
    unigram_perplexity: float
    tokens: int
    sequence_length: int
    data_fingerprint: str
    notes: tuple[str, ...]


def compare_runs(paths: Sequence[Path], baseline: str) -> Comparison:
    """Compare the finished runs in `paths` with `baseline`, the variant or the name of one of them.

    Raises UserError if a directory is no finished run, the baseline is not among them or not one alone, or
    the runs differ in data, tokens consumed, model shape, sequence length or validation setting.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a run was given twice: give each run directory once")
    runs = [read_finished_run(path) for path in paths]
    labels = _labels(runs)
    base = _find_baseline(runs, labels, baseline)
    _refuse_incomparable(runs, labels, base)
    order = [base, *(index for index in range(len(runs)) if index != base)]
    rows = {index: _row(runs[index], labels[index], runs[base]) for index in order}
    return Comparison(
        baseline=labels[base],
        runs=tuple(rows[index] for index in order),
        unigram_perplexity=runs[base].unigram_perplexity,
        tokens=runs[base].tokens,
        sequence_length=runs[base].config["data"]["sequence_length"],
        data_fingerprint=runs[base].data_fingerprint,
        notes=(_seeds_note(runs), *_settings_notes(runs, labels, base)),
    )


def _labels(runs: Sequence[FinishedRun]) -> list[str]:
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else str(run.path) for run in runs]


def _find_baseline(runs: Sequence[FinishedRun], labels: Sequence[str], baseline: str) -> int:
    matches = [index for index, label in enumerate(labels) if label == baseline]
    matches = matches or [index for index, run in enumerate(runs) if run.variant == baseline]
    if not matches:
        present = ", ".join(
            f"{label} (variant {run.variant})" for label, run in zip(labels, runs, strict=True)
        )
        raise UserError(f"--baseline {baseline} is none of the runs given; present are: {present}")
    if len(matches) > 1:
        names = ", ".join(labels[index] for index in matches)
        raise UserError(
            f"--baseline {baseline} is the variant of several runs: give the name of one of them: {names}"
        )
    return matches[0]


def _refuse_incomparable(runs: Sequence[FinishedRun], labels: Sequence[str], base: int) -> None:
    differences = []
    for what, value in _must_agree(runs[base]).items():
        for run, label in zip(runs, labels, strict=True):
            other = _must_agree(run)[what]
            if other != value:
                differences.append(f"{what} is {value} in {labels[base]} but {other} in {label}")
    if differences:
        raise UserError(
            f"these runs cannot be compared: {'; '.join(differences)}; "
            "compare runs of the same data, tokens, model shape, sequence length and validation"
        )


def _must_agree(run: FinishedRun) -> dict[str, Any]:
    data = run.config["data"]
    return {
        "data fingerprint": run.data_fingerprint,
        "tokens consumed": run.tokens,
        **_model_shape(run.config["model"]),
        "data.sequence_length": data["sequence_length"],
        "data.validation_samples": data["validation_samples"],
        "validation tokens per source": dict(run.validation_tokens),
        "validated sources": sorted(run.perplexity_by_source),
    }


def _model_shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that fix the function the model computes, with defaults resolved."""
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    shape = {
        key: model[key]
        for key in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "position_embedding")
    }
    shape["num_query_groups"] = model.get("num_query_groups") or heads
    shape["head_dim"] = model.get("head_dim") or hidden // heads
    shape["ffn_hidden_size"] = model.get("ffn_hidden_size") or 4 * hidden
    shape["rotary_base"] = model.get("rotary_base") if model["position_embedding"] == "rope" else None
    shape["tied_embeddings"] = model.get("tied_embeddings", True)
    return {f"model.{key}": value for key, value in shape.items()}


def _row(run: FinishedRun, label: str, base: FinishedRun) -> ComparedRun:
    values, base_values = _measures(run), _measures(base)
    gaps = {field: _relative_gap(values[field], base_values[field]) for field in GAP_FIELDS}
    perplexity = run.validation_perplexity
    return ComparedRun(
        name=label,
        variant=run.variant,
        seed=run.seed,
        path=run.path,
        validation_loss=run.validation_loss,
        validation_perplexity=perplexity,
        perplexity_by_source=dict(run.perplexity_by_source),
        perplexity_over_unigram=None if perplexity is None else perplexity / run.unigram_perplexity,
        tokens_per_second=run.tokens_per_second,
        trainable_parameters=run.trainable_parameters,
        frozen_parameters=run.frozen_parameters,
        gradient_and_optimizer_bytes=run.gradient_bytes + run.optimizer_state_bytes,
        checkpoint_bytes=run.checkpoint_bytes,
        gaps=gaps,
    )


def _measures(run: FinishedRun) -> dict[str, float | None]:
    return {
        "validation_perplexity": run.validation_perplexity,
        "tokens_per_second": run.tokens_per_second,
        "trainable_parameters": run.trainable_parameters,
        "frozen_parameters": run.frozen_parameters,
        "gradient_and_optimizer_bytes": run.gradient_bytes + run.optimizer_state_bytes,
        "checkpoint_bytes": run.checkpoint_bytes,
    }


def _relative_gap(value: float | None, base: float | None) -> float | None:
    if value is None or not base:
        return None
    return value / base - 1


def _seeds_note(runs: Sequence[FinishedRun]) -> str:
    counts = Counter(run.variant for run in runs)
    if set(counts.values()) == {1}:
        sizes = "n = 1 per variant"
    else:
        sizes = "n = " + ", ".join(f"{count} for {variant}" for variant, count in counts.items())
    return f"Each row is one run with one seed ({sizes}): no statistical significance is claimed."


def _settings_notes(runs: Sequence[FinishedRun], labels: Sequence[str], base: int) -> list[str]:
    """One sentence for each other setting that is not the same in all runs."""
    settings = [_other_settings(run) for run in runs]
    notes = []
    for key in sorted(set().union(*settings)):
        values = [setting.get(key) for setting in settings]
        if any(value != values[base] for value in values):
            listed = ", ".join(f"{value} in {label}" for value, label in zip(values, labels, strict=True))
            notes.append(f"The runs also differ in {key}: {listed}.")
    return notes


def _other_settings(run: FinishedRun) -> dict[str, Any]:
    settings = _flatten(run.config, "", lambda key: not key.startswith(_EXPECTED_TO_DIFFER))
    settings = {key: value for key, value in settings.items() if key not in _model_shape(run.config["model"])}
    for key in ("device", "world_size"):
        settings[f"environment.{key}"] = run.environment.get(key)
    return settings


def _flatten(tree: Mapping[str, Any], prefix: str, wanted: Callable[[str], bool]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flatten(value, name + ".", wanted))
        elif wanted(name):
            flat[name] = value
    return flat
