"""What TensorBoard's HPARAMS page says of a run: one row, whose columns tell runs apart.

TensorBoard takes the columns, and whether each holds text or numbers, from any one of the runs. So every run
writes every setting, and one that may be unset is text in all runs. Lists and mappings become short text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pretrain.config.sections import Section
from pretrain.config.tree import Config

HParam = str | float | int | bool

SECTIONS = ("model", "attention", "optimizer", "schedule", "data", "precision")
FIRST = ("attention.adapters", "attention.variant", "optimizer.learning_rate", "run.seed")
"""Shown before all others: TensorBoard opens with a few columns only."""


def hparams(config: Config) -> dict[str, HParam]:
    """{section.key: value} of everything that may tell this run from another."""
    resolved = config.resolved()
    values: dict[str, HParam] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        for key, value in resolved[name].items():
            # The model's sizes are filled in where they were left open, and are numbers in every run.
            as_text = name != "model" and _may_be_unset(section, key)
            values[f"{name}.{key}"] = hparam_text(value) if as_text or not _is_plain(value) else value
    return values | {"run.seed": config.run.seed}


def hparam_text(value: Any) -> str:
    """A setting as text: `none`, `core+low_rank`, `0.9, 0.98`, `{0-3: 1.0, 4-7: 0.5}`."""
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "+".join(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float)) for item in value):
        return ", ".join(map(str, value))
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, separators=(", ", ": ")).replace('"', "")
    return str(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, float, int, bool))


def _may_be_unset(section: Section, key: str) -> bool:
    return type(None) in get_args(type(section).model_fields[key].annotation)
