"""What TensorBoard's HPARAMS page says of a run: one row, whose columns tell runs apart.

TensorBoard takes the columns, and whether each holds text or numbers, from any one of the runs. So every run
writes every setting, and one that may be unset is text in all runs. Lists and mappings become short text.
"""

from __future__ import annotations

from typing import Any, get_args

from pretrain.config.sections import Section
from pretrain.config.tree import Config
from pretrain.reporting.text import setting_text

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
            values[f"{name}.{key}"] = _text(value) if as_text or not _is_plain(value) else value
    return values | {"run.seed": config.run.seed}


def _text(value: Any) -> str:
    return setting_text(None if value == {} else value, between_numbers=", ")


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, float, int, bool))


def _may_be_unset(section: Section, key: str) -> bool:
    return type(None) in get_args(type(section).model_fields[key].annotation)
