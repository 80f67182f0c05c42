"""The identity of a run, as its checkpoints state it, and the parallel layout that wrote one.

A resume refuses another identity. It may use another layout; the differences are reported.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from data_pipeline.shards.blend import Blend
from data_pipeline.shards.blend_difference import data_changes
from megatron_patches.bank.shards import head_digests, role_digest
from megatron_patches.engine.freeze import frozen_layers
from megatron_patches.recipe.policy import AXES, QKPolicy
from pretrain.checkpoint.format import About
from pretrain.config.attention import FORMER_PHASES, phases_of_unfreeze
from pretrain.config.keys import KEYS, Change, by_section
from pretrain.config.model import ModelSection
from pretrain.config.removed import PHASES, removed_sentence, without_removed
from pretrain.config.resolved import Layout, Resolved
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext, gathered, require_equal_on_all_ranks

DATA_KEYS = tuple(name for name, key in KEYS.items() if key.identity and key.data_change)
"""Settings that make other samples of the same data; data.allow_change lets them change."""

_DEFAULTS: dict[str, Any] = {
    **{f"attention.{axis.name}": axis.default for axis in fields(QKPolicy) if axis.name in AXES},
    **{
        f"model.{key}": ModelSection.model_fields[key].default
        for key in ("vocab_multiple", "norm", "mlp", "qk_norm", "init", "logit_softcap", "z_loss")
    },
    "optimizer.kind": "adamw",
}
"""Values that checkpoints mean by saying nothing: their keys are younger."""


AS_TRAINED = " as trained"
"""Ends the name of a digest of rows that were frozen as they were trained."""
_STEPS = f"the steps after which {PHASES} applies"


def run_identity(resolved: Resolved, blend: Blend) -> dict[str, Any]:
    """Return all that must be equal for a resume to continue the same run, as JSON.

    The layout over ranks is not a part of the identity. The digests of the frozen bank
    (`bank_digests`) are still missing: they are known once the model is built.
    """
    config = resolved.config
    recipe = resolved.recipe
    keys = {
        f"{section}.{key}": value
        for section, values in by_section(config.values).items()
        for key, value in values.items()
        if KEYS[f"{section}.{key}"].identity
    }
    if config.given_weights is not None:  # what is in the file, wherever it lies
        keys["model.initial_weights"] = config.given_weights.sha256
    if len(resolved.phases) > 1:
        keys[_STEPS] = [phase.first_step - 1 for phase in resolved.phases[1:]]
    return {
        "keys": keys,
        "data": blend.describe(),
        "frozen_bank": {"recipe": recipe.as_dict() if recipe else None, "sha256": {}},
    }


def accept_identity(
    checkpoint: str,
    saved: About,
    live: Mapping[str, Any],
    allow_data_change: bool,
    branch_step: int | None = None,
) -> list[str]:
    """Refuse to resume from another run's checkpoint.

    Args:
        checkpoint: named in refusals.
        saved: content of the checkpoint's checkpoint.json.
        live: this run's `run_identity`; the bank's digests are compared later (`check_bank`).
        allow_data_change: other data are accepted, but for another tokenizer.
        branch_step: the checkpoint's step, if the run begins as a branch: entries of
            attention.phases that act later may do so at other steps.

    Returns:
        The accepted differences of the data, as clauses.

    Raises:
        UserError: names all differences of the data, or the first setting that differs, or the
            difference of the frozen bank's recipe.
    """
    saved_settings = _with_phases(saved.keys)
    for key, was in saved_settings.items():
        if sentence := removed_sentence(key, was):
            raise UserError(f"checkpoint {checkpoint}: {sentence}")
    for key, value in live["keys"].items():
        was = without_removed(key, saved_settings.get(key))
        if key == PHASES and _STEPS in saved_settings and _STEPS in live["keys"]:
            was = phases_without_at(was)
            value = phases_without_at(value)
        younger = key not in saved_settings and value in (None, _DEFAULTS.get(key))
        if was == value or younger or (key in DATA_KEYS and not _fixed_by_weights(key, saved)):
            continue
        if key == _STEPS:
            if branch_step and same_phases_until(branch_step, saved.keys, live["keys"]):
                continue
            raise UserError(
                f"checkpoint {checkpoint}: {PHASES} applied after steps {was}, in this run it "
                f"would after {value}; set its `at`, parts of the run's steps, or schedule.steps "
                "so that the steps are the same, or choose another run.name to start afresh"
            )
        raise UserError(
            f"checkpoint {checkpoint} was written with {key}={was} but this run has {value}; set "
            "it back, or choose another run.name to start afresh"
        )
    changes = [
        f"{key} is {live['keys'][key]}, was {saved.keys.get(key)}"
        for key in DATA_KEYS
        if saved.keys.get(key) != live["keys"][key]
    ]
    changes += data_changes(saved.data, live["data"])
    if saved.data["tokenizer"] != live["data"]["tokenizer"]:
        raise UserError(
            f"checkpoint {checkpoint} was trained on ids of another tokenizer, which mean other "
            "text here; restore the shards, or choose another run.name to start afresh"
        )
    if changes and not allow_data_change:
        raise UserError(
            f"checkpoint {checkpoint} was trained on other data: {'; '.join(changes)}; restore the "
            "shards and settings, or set data.allow_change=true to continue with what there is now"
        )
    _check_recipe(checkpoint, saved.frozen_bank, live["frozen_bank"])
    return changes


def same_phases_until(step: int, saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return whether the entries of attention.phases are the same but for those that act later.

    Those may act at other steps. An entry acts `decay_steps` before the step that it applies after.

    Args:
        step: last step that both have trained.
        saved: settings of a checkpoint.
        live: settings of a run's identity.
    """
    was = _with_phases(saved)
    entries = phases_without_at(live.get(PHASES))
    before, after = (settings.get(_STEPS) or [] for settings in (was, live))
    if phases_without_at(was.get(PHASES)) != entries or len(before) != len(entries):
        return False
    return all(
        one == other or min(one, other) - entry.get("decay_steps", 0) >= step
        for entry, one, other in zip(entries, before, after, strict=True)
    )


def phases_without_at(entries: Any) -> Any:
    """Return entries of attention.phases without their parts of the run, which has any length."""
    present = without_removed(PHASES, entries) or ()
    return [{key: value for key, value in entry.items() if key != "at"} for entry in present]


def _with_phases(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's settings, those of attention.unfreeze as attention.phases has them."""
    settings = dict(keys)
    former = settings.pop(FORMER_PHASES, None)
    if former is not None:
        settings[PHASES] = phases_of_unfreeze(former)
        settings[_STEPS] = settings.pop(f"the steps after which {FORMER_PHASES} applies", None)
    return settings


def _fixed_by_weights(key: str, saved: About) -> bool:
    """Return whether a weight's shape depends on the key, as that of learned positions does."""
    if key != "data.sequence_length":
        return False
    learned_scores = key.removeprefix("data.") in (saved.frozen_bank["recipe"] or {})
    return learned_scores or saved.keys.get("model.position_embedding") == "learned"


def check_bank(checkpoint: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Compare two `frozen_bank` entries of `run_identity`.

    Args:
        checkpoint: named in refusals.
        saved: recipe and digests of the checkpoint's bank.
        live: recipe and digests of this run's bank.

    Raises:
        UserError: they differ.
    """
    _check_recipe(checkpoint, saved, live)
    differing = [
        key for key, digest in saved["sha256"].items() if live["sha256"].get(key) != digest
    ]
    if differing and differing[0].endswith(AS_TRAINED):
        raise UserError(
            f"frozen digest mismatch at {differing[0]}: rows that checkpoint {checkpoint} holds "
            "are not those that were frozen; restore it, or take another checkpoint"
        )
    if differing or len(saved["sha256"]) != len(live["sha256"]):
        raise UserError(
            f"frozen digest mismatch at {differing[0] if differing else 'its layers'}: the bank "
            f"regenerated here is not the one checkpoint {checkpoint} was trained with, though the "
            "recipe is the same; use the versions in the run's environment.json"
        )


def _check_recipe(checkpoint: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    was, now = ((bank["recipe"] or {}) for bank in (saved, live))
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            raise UserError(
                f"frozen digest mismatch: checkpoint {checkpoint} has a Query/Key bank with "
                f"{key}={was.get(key)} but this run regenerates it with {key}={now.get(key)}; set "
                "attention.seed (or run.seed) and the attention section back"
            )


def layout_changes(earlier: Mapping[str, Any], layout: Layout) -> list[Change]:
    """Return the differences of a run's layout from an earlier one.

    Args:
        earlier: content of `Layout.as_dict`, as a checkpoint holds it.
    """
    return [
        Change(key, earlier[key], value)
        for key, value in layout.as_dict().items()
        if key in earlier and earlier[key] != value
    ]


_NAMES = {
    "world_size": "ranks",
    "tensor_model_parallel_size": "TP",
    "data_parallel_size": "DP",
    "sequence_parallel": "sequence parallel",
    "zero_stage": "ZeRO",
    "micro_batch_size": "micro batch",
}
_OF_MASKS = ("tensor_model_parallel_size", "sequence_parallel", "micro_batch_size")
"""Settings on which the dropout masks depend."""


def layout_line(changes: list[Change], dropout: float) -> str:
    """Return one line that names the changes of the layout, and their consequence.

    Args:
        changes: differences from the layout that wrote the checkpoint.
    """
    differences = ", ".join(
        f"{_NAMES.get(change.key, change.key)} {_word(change.was)} -> {_word(change.value)}"
        for change in changes
    )
    line = f"resuming at another layout: {differences}"
    if dropout > 0 and any(change.key in _OF_MASKS for change in changes):
        line += "; with dropout > 0 the masks then differ from the uninterrupted run's"
    return line


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def bank_digests(model: Any, context: ParallelContext) -> dict[str, str]:
    """Return the SHA-256 of all live frozen rows for every (layer, role) (collective).

    Args:
        model: a model with the bank, and rows that are frozen as they were trained, in its buffers.

    Raises:
        UserError: on every rank, if two ranks hold different rows.
    """
    layers = [layer for _, layer in frozen_layers(model)]
    shards = [
        (f"layer={layer.layer} role={role}", heads, weight)
        for layer in layers
        for role, heads, weight in layer.frozen_shards()
    ]
    kept = {layer.layer for layer in layers if layer.kept_tensors()}
    return _digests(shards, context) | trained_digests(model, context, kept)


def trained_digests(
    model: Any, context: ParallelContext, layers: Collection[int]
) -> dict[str, str]:
    """Return the SHA-256 of rows that train, or are frozen as they were trained (collective).

    Args:
        layers: numbers of the layers to take the rows from.

    Returns:
        {layer and role as text: SHA-256}.

    Raises:
        UserError: on every rank, if two ranks hold different rows.
    """
    shards = [
        (f"layer={layer.layer} role={role}{AS_TRAINED}", heads, weight)
        for _, layer in frozen_layers(model)
        if layer.layer in layers
        for role, heads, weight in layer.trained_shards()
    ]
    return _digests(shards, context)


def _digests(
    shards: Iterable[tuple[str, Sequence[int], torch.Tensor]], context: ParallelContext
) -> dict[str, str]:
    """Return {name: SHA-256 of all heads} of (name, this rank's heads, their rows) (collective)."""
    rank_digests = {}
    for name, heads, weight in shards:
        rows = weight.size(0) // max(1, len(heads))
        digests = head_digests(weight.cpu(), rows) if heads else []
        rank_digests[name] = dict(zip(heads, digests, strict=True))
    ranks = gathered(rank_digests, context.tensor_parallel_group)
    role_digests = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        by_head = {head: sha for rank in ranks for head, sha in rank.get(name, {}).items()}
        role_digests[name] = role_digest(by_head[head] for head in sorted(by_head))
    require_equal_on_all_ranks(
        "the frozen Query/Key bank",
        json.dumps(role_digests),
        "give every rank the same config, numpy version and CPU kind",
    )
    return role_digests
