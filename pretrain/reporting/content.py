"""Values as strict JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
