"""Facts that must be equal for runs to be comparable, and notes on other differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from laboratory.runs.finished import FinishedRun
from laboratory.study.seeds import Groups, settings_of
from megatron_patches.recipe.block import MLPS
from megatron_patches.recipe.parts import ModelShape
from pretrain.config.keys import KEYS
from pretrain.config.model import ModelSection
from pretrain.config.removed import present_key
from pretrain.config.types import setting_of
from pretrain.errors import UserError
from pretrain.reporting.text import setting_text
from pretrain.runs.environment import data_changes

EXPECTED_TO_DIFFER = frozenset(name for name, key in KEYS.items() if not key.noted)
"""Settings that name or place a run, or by which runs are compared; others are reported."""

_FOLLOWS = {
    "data.validation_tokens": "data.fingerprint",
    "data.validation_sources": "data.fingerprint",
}
"""{fact: fact that it follows from}: naming that one as the subject releases this one too."""
_LENGTHS = {"schedule.steps", "schedule.tokens", "schedule.flops"}
"""Settings that say how many tokens a run trains on."""


def find_subjects(runs: Sequence[FinishedRun], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of the facts and settings that are named as the subject.

    Args:
        names: Facts that must otherwise agree (`tokens`, `data.fingerprint`, `model.num_layers`, …)
            or any other settings of the config.

    Returns:
        {name: its value in each run}.

    Raises:
        UserError: a name is unknown, is an attention setting (those tell variants apart anyway), or
            does not differ.
    """
    subjects: dict[str, list[Any]] = {}
    for name in names:
        if name.startswith("attention."):
            raise UserError(
                f"--subject {name} is not needed: attention settings tell variants apart "
                "without it; leave it out"
            )
        settings_by_run = [settings_of(run) | _facts(run) for run in runs]
        if not any(name in values for values in settings_by_run):
            raise UserError(
                f"--subject {name} is nothing these runs have; give a config key (section.key) or "
                f"one of {', '.join(_facts(runs[0]))}"
            )
        values = [values.get(name) for values in settings_by_run]
        if len({setting_text(value) for value in values}) == 1:
            raise UserError(
                f"--subject {name} is {setting_text(values[0])} in every run; leave it out"
            )
        subjects[name] = values
    return subjects


def common_flops(runs: Sequence[FinishedRun]) -> int | None:
    """Return the `schedule.flops` that all runs share; None where they differ or lack it."""
    flops = {run.config.get("schedule", {}).get("flops") for run in runs}
    return flops.pop() if len(flops) == 1 else None


def shapes_of_labels(runs: Sequence[FinishedRun], labels: Sequence[str]) -> set[str]:
    """Return the settings of the model's shape that differ between labels but not within one.

    Args:
        labels: Name of the variant of each run, which stands for its shape too.
    """
    shapes = [_shape(run.config["model"]) for run in runs]
    differing = set()
    for name in shapes[0]:
        values = [setting_text(shape[name]) for shape in shapes]
        one_of_each = len(set(zip(labels, values, strict=True))) == len(set(labels))
        if one_of_each and len(set(values)) > 1:
            differing.add(name)
    return differing


def refuse_incomparable(runs: Sequence[FinishedRun], subjects: Collection[str], match: str) -> None:
    """Refuse runs that differ in data, tokens, model shape or evaluation.

    Args:
        subjects: Facts that may differ.
        match: With flops, tokens may differ where all runs had the same `schedule.flops`.

    Raises:
        UserError: names every difference, with a run for each side, and the option that makes it
            the subject.
    """
    facts = [_facts(run) for run in runs]
    differences = {}
    flops = common_flops(runs)
    for name, value in facts[0].items():
        if name in subjects or (name == "tokens" and match == "flops" and flops):
            continue
        other = next((i for i, fact in enumerate(facts) if fact[name] != value), None)
        if other is None or _follows(name, subjects, runs, facts):
            continue
        texts = [setting_text(value), setting_text(facts[other][name])]
        if name == "data.fingerprint":
            # Eight digits tell fingerprints apart; the whole of them would hide the sentence.
            texts = [f"{text[:8]}…" for text in texts]
        differences[name] = (
            f"{name} is {texts[0]} in {runs[0].path} but {texts[1]} in {runs[other].path}"
        )
    if differences:
        options = " ".join(f"--subject {name}" for name in differences)
        # Runs of equal FLOPs differ in tokens by design, so that option is what the user wants.
        if list(differences) == ["tokens"] and flops:
            options = "--match flops"
        raise UserError(
            f"these runs cannot be compared: {'; '.join(differences.values())}; compare runs of "
            f"the same data, tokens, model shape and evaluation, or say {options} if that is what "
            "is compared"
        )


def _follows(
    name: str,
    subjects: Collection[str],
    runs: Sequence[FinishedRun],
    facts: Sequence[Mapping[str, Any]],
) -> bool:
    """Return whether a fact differs only as a consequence of another fact."""
    if name == "data.validation_samples" and "data.sequence_length" in subjects:
        return len(_validated(runs)) == 1
    derived = [_derived(run.config["model"]).get(name) for run in runs]
    return _FOLLOWS.get(name) in subjects or derived == [fact[name] for fact in facts]


def _validated(runs: Sequence[FinishedRun]) -> set[int]:
    """Return the most held-out tokens of a source that each run's validation takes."""
    data = [run.config["data"] for run in runs]
    return {settings["validation_samples"] * settings["sequence_length"] for settings in data}


def length_notes(runs: Sequence[FinishedRun], subjects: Mapping[str, Any]) -> list[str]:
    """Return a note on losses where lengths of samples are the subject.

    Args:
        subjects: Facts that may differ.
    """
    if "data.sequence_length" not in subjects:
        return []
    cause = "samples of another length cut the held-out text otherwise"
    if len(_validated(runs)) > 1:
        cause += ", and data.validation_samples of them are another part of it"
    return [
        f"Losses of different data.sequence_length are not of the same tokens ({cause}); gaps "
        "within one length are."
    ]


def _facts(run: FinishedRun) -> dict[str, Any]:
    """Return the facts that must agree: data, training tokens, model shape and evaluation."""
    data = run.config["data"]
    model = run.config["model"]
    return {
        "data.fingerprint": run.data_fingerprint,
        "tokens": run.result.tokens,
        **_shape(model),
        "data.sequence_length": data["sequence_length"],
        "data.reset_at_document_end": data.get("reset_at_document_end", False),
        "data.validation_samples": data["validation_samples"],
        "data.validation_tokens": dict(run.validation_tokens),
        "data.validation_sources": sorted(run.result.perplexity_by_source),
    }


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the model's shape, by the keys that the configuration marks so."""
    derived = _derived(model)
    shape = {}
    for key, field in ModelSection.model_fields.items():
        if setting_of(field).shape:
            value = model.get(key)
            default = derived.get(f"model.{key}", field.default)
            shape[f"model.{key}"] = default if value is None else value
    if model["position_embedding"] != "rope":
        # Without rotary positions the base has no effect and must not keep runs apart.
        shape["model.rotary_base"] = None
    return shape


def _derived(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the values that unset settings of the shape get."""
    heads = model["num_attention_heads"]
    hidden = model["hidden_size"]
    mlp = MLPS[model.get("mlp", ModelShape.mlp)]
    return {
        "model.num_query_groups": heads,
        "model.head_dim": hidden // heads,
        "model.ffn_hidden_size": mlp.width(hidden),
    }


def settings_notes(
    groups: Groups[FinishedRun], subjects: Mapping[str, Any], shapes: Collection[str]
) -> list[str]:
    """Return one sentence for each further setting in which the runs differ.

    Args:
        subjects: Settings that may differ.
        shapes: Settings of the shape that differ too, of `shapes_of_labels`.
    """
    settings = {run.path: _other_settings(run, shapes) for run in groups.runs}
    keys = set().union(*settings.values()) - set(subjects)
    if "tokens" in subjects:
        # The length is the subject then; noting its settings would repeat it.
        keys -= _LENGTHS
    notes = []
    for key in sorted(keys):
        places = _places(
            groups, {path: run_settings.get(key) for path, run_settings in settings.items()}
        )
        if len(places) > 1:
            listed = "; ".join(f"{value} in {_list(names)}" for value, names in places.items())
            notes.append(f"The runs also differ in {key}: {listed}.")
    return notes + _changes_on_the_way(groups.runs)


def _changes_on_the_way(runs: Sequence[FinishedRun]) -> list[str]:
    """Return a sentence for each setting that a resume changed, and one for the data."""
    places: dict[str, list[str]] = {}
    for run in runs:
        for recorded, was, step in run.earlier_settings:
            key = present_key(recorded)
            if key in KEYS and KEYS[key].method:
                change = f"{setting_text(was)} in {run.name} up to step {step}"
                places.setdefault(key, []).append(change)
        for clause, step in data_changes(run.environment):
            places.setdefault("data", []).append(f"{clause} in {run.name} from step {step} on")
    return [
        f"{key} changed on the way: {'; '.join(changes)}."
        for key, changes in sorted(places.items())
    ]


def _places(groups: Groups[FinishedRun], values: Mapping[Path, Any]) -> dict[str, list[str]]:
    """Return {value as text: names of the labels, or groups, or runs that have it}.

    Args:
        groups: The runs.
        values: {path of a run: its value of a setting}.
    """
    of_label: dict[str, set[str]] = {}
    for group in groups.groups:
        group_texts = {setting_text(values[run.path]) for run in group.runs}
        of_label.setdefault(group.label, set()).update(group_texts)
    places: dict[str, list[str]] = {}
    for group in groups.groups:
        texts = {run.name: setting_text(values[run.path]) for run in group.runs}
        name = group.label if len(of_label[group.label]) == 1 else group.name
        whole = len(set(texts.values())) == 1
        for run, text in texts.items():
            places.setdefault(text, []).append(name if whole else run)
    return places


def _list(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def seed_notes(groups: Groups[FinishedRun]) -> list[str]:
    """Return notes on pairs of equal run.seed whose data.seed differs."""
    notes = []
    for group in groups.groups:
        base = {run.seed: run for run in groups.baseline_of(group).runs}
        paired = [run for run in group.runs if run.seed in base]
        unequal = [run.name for run in paired if _data_seed(run) != _data_seed(base[run.seed])]
        if unequal:
            notes.append(
                f"{_list(unequal)} and the baseline's run of the same run.seed have different "
                "data.seed: these pairs did not see the same samples in the same order."
            )
    return notes


def _data_seed(run: FinishedRun) -> Any:
    seed = run.config["data"].get("seed")
    return run.seed if seed is None else seed


def _other_settings(run: FinishedRun, shapes: Collection[str]) -> dict[str, Any]:
    facts = _facts(run)
    judged = EXPECTED_TO_DIFFER | facts.keys()
    return {
        **{key: value for key, value in settings_of(run).items() if key not in judged},
        **{key: facts[key] for key in shapes},
        "environment.device": run.device,
        "environment.world_size": run.environment.get("world_size"),
        "environment.tensor_model_parallel_size": run.environment.get("tensor_model_parallel_size"),
        "audit.zero_stage": run.zero_stage,  # what deepspeed.config=auto was for this run
    }
