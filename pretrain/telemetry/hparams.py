"""TensorBoard's HPARAMS page: a row with hyperparameters and results for each finished run.

TensorBoard takes the columns and their types, text or number, from an arbitrary run. So every run
writes every setting, and a setting that may be unset is text in all runs. Lists and mappings become
short text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from pretrain.config.attention import named_variant
from pretrain.config.keys import KEYS, SECTIONS, by_section
from pretrain.reporting.text import setting_text
from pretrain.runs import tags
from pretrain.runs.curves import WARM_UP, RunCurves, read_curves
from pretrain.runs.directory import RunDirectory, newest_checkpoint_bytes
from pretrain.runs.facts import read_facts

HParam = str | float | int | bool

FIRST = (
    "attention.variant",
    "optimizer.learning_rate",
    "result.memory_MiB",
    "result.perplexity",
    "result.tokens_per_second",
)
"""The five columns that TensorBoard shows at first, in its order. It shows settings before results,
and a window of 1,400 pixels cuts the results off, so three of them are repeated as settings."""


def hparams(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, HParam]:
    """Return {section.key: value} of the keys that are declared as hyperparameters.

    A named combination is shown as the variant of that name, as in `compare`.

    Args:
        settings: Sections from `Config.values`.
    """
    values: dict[str, HParam] = {}
    sections = by_section(settings)
    for name in (name for name, key in KEYS.items() if key.hparam):
        section, _, key = name.rpartition(".")
        value = sections[section][key]
        # The model's open sizes are filled in, so they are numbers in every run.
        may_be_unset = type(None) in get_args(SECTIONS[section].model_fields[key].annotation)
        filled_in = section == "model" and isinstance(value, int)
        if (may_be_unset and not filled_in) or not isinstance(value, (str, float, int, bool)):
            value = setting_text(None if value == {} else value, between_numbers=", ")
        values[name] = value
    attention = settings["attention"]
    values["attention.variant"] = named_variant(attention["variant"], attention)
    return values


def results(run: RunDirectory) -> dict[str, float]:
    """Return {tag: value} of the results of a run whose last step is recorded and saved.

    HPARAMS shows a tag's last scalar, which for a speed would be a single step's, so medians have
    their own tags. Bytes, which the page shows unscaled, are in MiB. Unknown values and those that
    are not finite are left out.

    Raises:
        UserError: the records are damaged.
    """
    curves = read_curves(run.metrics)
    data = read_facts(run.data)
    summary = {
        "median_tokens_per_second": _steady_median(curves, tags.TOKENS_PER_SECOND),
        "peak_device_MiB": np.fmax.reduce(curves[tags.DEVICE_BYTES]) / 2**20,
        "gradients_MiB": curves[tags.GRADIENT_BYTES][-1] / 2**20,
        "optimizer_state_MiB": curves[tags.OPTIMIZER_STATE_BYTES][-1] / 2**20,
        "peak_host_MiB": np.fmax.reduce(curves[tags.HOST_BYTES]) / 2**20,
        "checkpoint_MiB": (newest_checkpoint_bytes(run.path) or math.nan) / 2**20,
        "trainable_parameters": curves[tags.TRAINABLE_PARAMETERS][-1],
        "frozen_parameters": curves[tags.FROZEN_PARAMETERS][-1],
        "median_step_seconds": _steady_median(curves, tags.STEP_SECONDS),
        "bits_per_byte": _bits_per_byte(curves[tags.VALIDATION_LOSS][-1], data),
    }
    # The order is that of the columns, of which TensorBoard shows the first five by default.
    values = {tags.PERPLEXITY.tag: curves[tags.PERPLEXITY][-1]}
    values |= {tags.SUMMARY.format(name): value for name, value in summary.items()}
    values |= {metric.tag: curves[metric][-1] for metric in (tags.VALIDATION_LOSS, tags.LOSS)}
    return {tag: float(value) for tag, value in values.items() if math.isfinite(value)}


def in_front(final: Mapping[str, float]) -> dict[str, HParam]:
    """Return the entries of `results` that are repeated as settings."""
    parts = [tags.SUMMARY.format(f"{name}_MiB") for name in ("gradients", "optimizer_state")]
    columns = {
        "result.memory_MiB": sum(final.get(part, math.nan) for part in parts),
        "result.perplexity": final.get(tags.PERPLEXITY.tag, math.nan),
        "result.tokens_per_second": final.get(
            tags.SUMMARY.format("median_tokens_per_second"), math.nan
        ),
    }
    return {name: round(value, 2) for name, value in columns.items() if math.isfinite(value)}


def _steady_median(curves: RunCurves, metric: tags.Metric) -> float:
    """Return the median after the start-up, as in `compare`."""
    return float(np.nanmedian(curves[metric][curves.after(WARM_UP * curves.steps[-1])]))


def _bits_per_byte(loss: float, data: Mapping[str, Any]) -> float:
    """Return the validation loss in bits per held-out byte; NaN for an older data.json."""
    size = sum(data.get("validation_bytes", {}).values())
    return loss * sum(data["validation_tokens"].values()) / size / math.log(2) if size else math.nan
