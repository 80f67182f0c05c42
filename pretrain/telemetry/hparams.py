"""Hyperparameters of a run for TensorBoard's HPARAMS page: one row, whose columns tell runs apart.

TensorBoard takes the columns, and whether each holds text or numbers, from any one of the runs. So every run
writes every setting, and a setting that may be unset is text in all runs. Lists and mappings become short
text.
"""

from __future__ import annotations

from typing import Any, get_args

from pretrain.config.keys import KEYS, SECTIONS
from pretrain.config.tree import Config
from pretrain.reporting.text import setting_text

HParam = str | float | int | bool

FIRST = ("attention.adapters", "attention.variant", "optimizer.learning_rate", "run.seed")
"""Shown before all others: TensorBoard opens with a few columns only."""


def hparams(config: Config) -> dict[str, HParam]:
    """Return {section.key: value} of the keys that are declared as hyperparameters."""
    resolved = config.resolved()
    values: dict[str, HParam] = {}
    for name in (name for name, key in KEYS.items() if key.hparam):
        section, _, key = name.partition(".")
        value = resolved[section][key]
        # The model's sizes are filled in where they were left open, and are numbers in every run.
        may_be_unset = type(None) in get_args(SECTIONS[section].model_fields[key].annotation)
        if (may_be_unset and section != "model") or not isinstance(value, (str, float, int, bool)):
            value = _text(value)
        values[name] = value
    return values


def _text(value: Any) -> str:
    return setting_text(None if value == {} else value, between_numbers=", ")
