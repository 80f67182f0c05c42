"""The identity of a run, as its checkpoints state it, and the check whether a run may resume from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from data_pipeline.shards.blend import Blend
from data_pipeline.shards.blend_difference import data_changes
from megatron_patches.recipe.phases import last_steps
from megatron_patches.recipe.policy import AXES, QKPolicy
from pretrain.checkpoint.format import About
from pretrain.config.keys import KEYS
from pretrain.config.tree import Config
from pretrain.errors import UserError

DATA_KEYS = tuple(name for name, key in KEYS.items() if key.identity and key.data_change)
"""Settings that make other samples of the same data; data.allow_change lets them change too."""

_DEFAULTS: dict[str, Any] = {
    **{f"attention.{axis.name}": axis.default for axis in fields(QKPolicy) if axis.name in AXES},
    "model.vocab_multiple": 1,
}
"""Values that checkpoints mean by saying nothing: their keys are younger."""


def run_identity(config: Config, bank: Mapping[str, str], blend: Blend) -> dict[str, Any]:
    """Return all that must be equal for a resume to continue the same run, as JSON.

    The layout over ranks is no part of the identity (see `layout`). `bank`: digests of the frozen bank,
    `bank_digests(...)`; empty if they are not known yet.
    """
    recipe = config.recipe()
    keys = {
        f"{section}.{key}": value
        for section, values in config.resolved().items()
        for key, value in values.items()
        if KEYS[f"{section}.{key}"].identity
    }
    if config.given_weights is not None:  # what is in the file, wherever it lies
        keys["model.initial_weights"] = config.given_weights.sha256
    schedule = config.policy().unfreeze
    if schedule:  # its fractions are of the run's length, which may otherwise change
        steps = last_steps(schedule, config.total_steps)
        keys["the steps after which attention.unfreeze applies"] = steps
    return {
        "keys": keys,
        "data": blend.describe(),
        "frozen_bank": {"recipe": recipe.as_dict() if recipe else None, "sha256": dict(bank)},
    }


def accept_identity(
    checkpoint: str, saved: About, live: Mapping[str, Any], allow_data_change: bool
) -> list[str]:
    """Refuse to resume from another run's checkpoint.

    `live`: this run's `run_identity`; the bank's digests are compared later (`check_bank`). Returns the
    accepted differences of the data, as clauses. Raises UserError: names all differences of the data, or the
    first setting that differs, or the difference of the frozen bank's recipe.
    """
    for key, value in live["keys"].items():
        was = saved.keys.get(key)
        if key not in saved.keys and value in (None, _DEFAULTS.get(key)):  # the key is younger
            continue
        if was == value or (key in DATA_KEYS and not _fixed_by_weights(key, saved)):
            continue
        raise UserError(
            f"checkpoint {checkpoint} was written with {key}={was} but this run has {value}; set it back, or "
            "choose another run.name to start afresh"
        )
    changes = [
        f"{key} is {live['keys'][key]}, was {saved.keys.get(key)}"
        for key in DATA_KEYS
        if saved.keys.get(key) != live["keys"][key]
    ]
    changes += data_changes(saved.data, live["data"])
    if saved.data["tokenizer"] != live["data"]["tokenizer"]:
        raise UserError(
            f"checkpoint {checkpoint} was trained on ids of another tokenizer, which mean other text here; "
            "restore the shards, or choose another run.name to start afresh"
        )
    if changes and not allow_data_change:
        raise UserError(
            f"checkpoint {checkpoint} was trained on other data: {'; '.join(changes)}; restore the shards "
            "and settings, or set data.allow_change=true to go on with what there is now"
        )
    _check_recipe(checkpoint, saved.frozen_bank, live["frozen_bank"])
    return changes


def _fixed_by_weights(key: str, saved: About) -> bool:
    """Return whether a weight's shape depends on the key: learned positions have sequence_length rows."""
    if key != "data.sequence_length":
        return False
    learned_scores = key.removeprefix("data.") in (saved.frozen_bank["recipe"] or {})
    return learned_scores or saved.keys.get("model.position_embedding") == "learned"


def check_bank(checkpoint: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Compare two `frozen_bank` entries of `run_identity`. Raises UserError: they differ."""
    _check_recipe(checkpoint, saved, live)
    differing = [key for key, digest in saved["sha256"].items() if live["sha256"].get(key) != digest]
    if differing or len(saved["sha256"]) != len(live["sha256"]):
        raise UserError(
            f"frozen digest mismatch at {differing[0] if differing else 'its layers'}: the bank regenerated "
            f"here is not the one checkpoint {checkpoint} was trained with, though the recipe is the same; "
            "use the versions in the run's environment.json"
        )


def _check_recipe(checkpoint: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    recipes = saved["recipe"] or {}, live["recipe"] or {}
    for key in recipes[0].keys() | recipes[1].keys():
        if recipes[0].get(key) != recipes[1].get(key):
            raise UserError(
                f"frozen digest mismatch: checkpoint {checkpoint} has a Query/Key bank with "
                f"{key}={recipes[0].get(key)} but this run regenerates it with {key}={recipes[1].get(key)}; "
                "set attention.seed (or run.seed) and the attention section back"
            )
