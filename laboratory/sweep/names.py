"""Names of a sweep's runs: readable, from what varies, reproducible, safe as directory names.

orthogonal-rope-seed_3      a word stands for itself
vanilla-num_layers_4        anything else comes after its key
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.errors import UserError

LONGEST_WORD = 60
LONGEST_NAME = 150
RESERVED = ("comparison", "logs", "sample_order", "seals")
"""Other names in the directory of the runs."""


@dataclass(frozen=True)
class NamedValues:
    """The values that vary in one run.

    Attributes:
        values: (key, value) pairs in order.
        label: Name of the first values.
        labelled: Number of values that the label stands for.
    """

    values: tuple[tuple[str, Any], ...]
    label: str | None = None
    labelled: int = 0

    def beside(self, label: Any) -> str:
        """Return a key of the run with another label and otherwise equal values."""
        return repr((label, self.values[self.labelled :]))


def run_names(runs: Sequence[NamedValues], source: str) -> list[str]:
    """Return one name per run, different even where upper and lower case are not told apart.

    Runs whose values read alike (`a/b` and `a b`) are told apart by a hash of the values.

    Args:
        runs: Values that vary in each run.
        source: The grid file, for messages, and the name of a run if nothing varies.

    Raises:
        UserError: two runs have the same values, or a name is the sweep's own.
    """
    names = _short_keys({key for run in runs for key, _ in run.values})
    plain = [
        _name(run, names) or _word(source.rpartition("/")[2].removesuffix(".yaml")) for run in runs
    ]
    alike = Counter(name.casefold() for name in plain)
    unique = [
        f"{name}-{_hash(run)}" if alike[name.casefold()] > 1 else name
        for name, run in zip(plain, runs, strict=True)
    ]
    for name, count in Counter(unique).items():
        if count > 1:
            raise UserError(f"grid {source} asks for the same run twice: {name.rpartition('-')[0]}")
        if name.casefold() in RESERVED:
            raise UserError(f"grid {source}: a run cannot be called '{name}'; give it another name")
    return unique


def _name(run: NamedValues, names: dict[str, str]) -> str:
    parts = [] if run.label is None else [run.label]
    parts += [_part(names[key], value) for key, value in run.values[run.labelled if parts else 0 :]]
    name = "-".join(parts)
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{_hash(run)}"


def _part(key: str, value: Any) -> str:
    speaks_for_itself = bool(value) and all(isinstance(item, str) for item in _items(value))
    return _text(value) if speaks_for_itself else f"{key}_{_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, dict) or any(isinstance(item, (dict, list)) for item in _items(value)):
        return _digest(value)
    return "+".join(_word(item) for item in _items(value)) or "none"


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [value]


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = re.sub(r"[^A-Za-z0-9._+]+", "_", str(value)).strip("._")
    if not text or len(text) > LONGEST_WORD:
        return f"{text[:LONGEST_WORD]}_{_digest(value)}".lstrip("_")
    return text


def _short_keys(keys: set[str]) -> dict[str, str]:
    """Return each key's last part, or the whole key where another key ends alike."""
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return {
        key: key if ends[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys
    }


def _hash(run: NamedValues) -> str:
    return _digest([run.label, *run.values])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
