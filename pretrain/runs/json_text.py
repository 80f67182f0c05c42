"""JSON as its standard has it: every key once, and no number that is none."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON, or nested too deeply, or with a key twice, NaN or infinity.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in content if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return content


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"it has {word}, which JSON does not know")
