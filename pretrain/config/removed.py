"""Settings of earlier versions that are gone or renamed, with what to use instead.

A configuration, grid, seal or checkpoint with one of them is refused with its sentence. A key whose
value changed nothing is left out instead, so that runs of earlier versions can still be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAST_WITH_THEM = "tag v0.5-lab (commit 20f53ff5)"
"""The last version that supports everything in these tables."""


@dataclass(frozen=True)
class Removed:
    """A key that is gone.

    Attributes:
        instead: What to do without it, as a clause.
        neutral: Values that changed nothing; with one of them the key is left out.
    """

    instead: str
    neutral: tuple[Any, ...] = (None,)


REMOVED_KEYS: Mapping[str, Removed] = {
    "performance.structured_products": Removed(
        "two batched products are as fast or faster on every GPU that was tried; leave it out",
        neutral=("auto", "products"),
    ),
    "attention.score_bound": Removed(
        "hold scores by model.qk_norm=true, or by optimizer.qk_clip where W_Q and W_K train"
    ),
}
"""{`section.key`: how it was removed}"""

REMOVED_VALUES: Mapping[str, Mapping[str, str]] = {
    "attention.variant": {
        "gaussian_naive": "use gaussian with attention.gaussian_std=0.02",
        "early_freeze": "use gaussian with attention.gaussian_std=0.02, attention.frozen_heads="
        "{50%-100%: 1.0} and attention.phases=[{at: 0.1, train: 50%-100%}]",
    },
    "attention.adapters": {
        "logit_scale": "use channel_scale, which scales each channel of the queries",
        "qk_norm": "use model.qk_norm=true",
    },
    "attention.frozen_roles": {
        "output": "leave it out, the output projection trains",
        "all": "leave it out, which freezes queries and keys",
    },
}
"""{`section.key`: {value, or item of a list: what to do without it, as a clause}}"""

PHASES = "attention.phases"
_REMOVED_IN_PHASES: Mapping[str, Removed] = {
    "heads": Removed(
        "freeze whole layers, or choose heads from the start by attention.frozen_heads",
        neutral=(None, 1.0),
    ),
    "roles": Removed(
        "freeze whole layers, or choose a role from the start by attention.frozen_roles",
        neutral=(None, "both"),
    ),
    "orthonormal": Removed("rows are frozen as they are", neutral=(None, False)),
}
"""{key of an entry of attention.phases: how it was removed}"""


FORMER_KEYS: Mapping[str, str] = {
    f"optimizer.{key}": f"optimizer.muon.{key}"
    for key in (
        "embedding_learning_rate",
        "output_learning_rate",
        "vector_learning_rate",
        "momentum",
        "nesterov",
        "newton_schulz_steps",
        "newton_schulz_dtype",
        "update_scale",
    )
}
"""{name of a key in runs of earlier versions: present name}"""


def present_key(key: str) -> str:
    """Return the present name of a key that a run of any version has recorded."""
    return FORMER_KEYS.get(key, key)


def removed_sentence(key: str, value: Any) -> str | None:
    """Return the refusal of a setting whose key or value was removed; None if neither was.

    Args:
        key: As `section.key`.
        value: As a file or a checkpoint holds it.
    """
    removed = REMOVED_KEYS.get(key)
    if removed is not None and value not in removed.neutral:
        return f"{key} was removed; {LAST_WITH_THEM} has it: {removed.instead}"
    items = value if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if key == PHASES and isinstance(item, Mapping):
            for name, gone in _REMOVED_IN_PHASES.items():
                if item.get(name) not in gone.neutral:
                    return f"{key}: '{name}' was removed; {LAST_WITH_THEM} has it: {gone.instead}"
        instead = REMOVED_VALUES.get(key, {}).get(item) if isinstance(item, str) else None
        if instead is not None:
            return f"{key}: '{item}' was removed; {LAST_WITH_THEM} has it: {instead}"
    return None


def without_removed(key: str, value: Any) -> Any:
    """Return the value of a setting without the removed keys of its entries.

    Args:
        key: As `section.key`.
        value: A value that `removed_sentence` does not refuse.
    """
    if key != PHASES or not isinstance(value, (list, tuple)):
        return value
    return [
        {name: part for name, part in entry.items() if name not in _REMOVED_IN_PHASES}
        if isinstance(entry, Mapping)
        else entry
        for entry in value
    ]
