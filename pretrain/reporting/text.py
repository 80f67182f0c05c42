"""Numbers and settings as short text, perplexity, and mean and deviation of a few values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.io.words import shown_in_line


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a few values.

    Attributes:
        n: Number of values.
        sd: Standard deviation, n - 1 in the denominator; None for a single value.
    """

    n: int
    mean: float
    sd: float | None


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and standard deviation; None for no values."""
    if not values:
        return None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(n=len(values), mean=float(np.mean(values)), sd=sd)


def spread_of_all(values: Sequence[float | None]) -> Spread | None:
    """Return mean and standard deviation; None where a value is missing.

    A mean of the present values alone would mislead.
    """
    present = [value for value in values if value is not None]
    return spread(present) if len(present) == len(values) else None


def perplexity(mean_loss: float) -> float:
    """Return exp(mean loss in nats per token); infinite where that overflows a float64."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf


NOTHING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with thousands separated, to `digits` after the point; a dash for None."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 4) -> str:
    """Return a number with its sign, to `digits` after the point; a dash for None."""
    # Plus zero: what rounds to nothing has no minus.
    return NOTHING if value is None else f"{round(value, digits) + 0.0:+,.{digits}f}"


def share(value: float) -> str:
    """Return a fraction as whole percent."""
    return f"{100 * value:.0f} %"


def percent(ratio: float | None) -> str:
    """Return a ratio's distance from 1 as signed percent."""
    return NOTHING if ratio is None else f"{signed(100 * (ratio - 1), 1)} %"


def mean_sd(value: Spread | None, digits: int, separator: str = " ", missing: str = NOTHING) -> str:
    """Return `mean ± sd`; for a single value the mean alone.

    Args:
        separator: Text before the ±.
        missing: Text for None.
    """
    if value is None:
        return missing
    text = number(round(value.mean, digits) + 0.0, digits)  # no -0.0
    return text if value.sd is None else f"{text}{separator}± {number(value.sd, digits)}"


def interval(low: float | None, high: float | None, digits: int = 4) -> str:
    """Return `[low, high]`, signed; a dash where an end is None."""
    if low is None or high is None:
        return NOTHING
    return f"[{signed(low, digits)}, {signed(high, digits)}]"


def byte_count(count: float | None) -> str:
    """Return bytes in the binary unit that leaves one to four digits before the point."""
    if count is None:
        return NOTHING
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def setting_text(value: Any, between_numbers: str = "+") -> str:
    """Return a setting's value as text: `none`, `core+low_rank`, `{0-3: 1.0, 4-7: 0.5}`.

    between_numbers: Text that joins a list of numbers. A label is one word, joined by `+`.
    """
    return shown_in_line(_setting_text(value, between_numbers))


def _setting_text(value: Any, between_numbers: str) -> str:
    if isinstance(value, (list, tuple)) and all(
        isinstance(item, (str, int, float)) for item in value
    ):
        words = any(isinstance(item, str) for item in value)
        return ("+" if words else between_numbers).join(map(str, value)) or "none"
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, separators=(", ", ": ")).replace('"', "")
    return "none" if value is None else str(value)
