"""Arms of the head-wise test: replacements of queries and keys, and the layers they apply to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_patches.recipe.layers import layer_range
from pretrain.errors import UserError


class Condition(str, Enum):
    """Treatment of the queries and keys of the chosen layers. All but the first freeze them."""

    unfrozen = "unfrozen"
    """Left as they are, and trained: the baseline."""
    frozen = "frozen"
    """Left as they are, biases too."""
    orthonormal = "orthonormal"
    """Orthonormal rows of the bank, per head."""
    gaussian = "gaussian"
    """Entries N(0, 1/hidden_size), of the same streams: the same expected norm, not orthonormal."""
    reorthonormalized = "reorthonormalized"
    """Q of the QR decomposition of each head's own rows: pretrained row space, new lengths and angles."""


class Norm(str, Enum):
    """Length of the new rows."""

    unit = "unit"
    """As drawn: rows of length 1 (gaussian: in expectation)."""
    match = "match"
    """Each head times one number, which gives it the Frobenius norm of what it replaces."""


@dataclass(frozen=True)
class Arm:
    """Arm of the test: a condition, and the layers that it applies to, as the user wrote them."""

    condition: Condition
    layers: str = ""

    @property
    def name(self) -> str:
        whole = self.layers in ("", "all")
        return self.condition.value if whole else f"{self.condition.value}, layers {self.layers}"

    @property
    def file_name(self) -> str:
        return self.name.replace(", layers ", "-layers-").replace("%", "pct")


def arms(conditions: Sequence[Condition], layers: Sequence[str]) -> list[Arm]:
    """Return every condition with every range of layers; `unfrozen`, which has none, once and first."""
    others = [Arm(c, part) for part in layers for c in conditions if c is not Condition.unfrozen]
    return list(dict.fromkeys([Arm(Condition.unfrozen), *others]))


def find_conditions(text: str) -> list[Condition]:
    """Return the conditions of a list such as `frozen,orthonormal`.

    Raises UserError: a name is none of them.
    """
    known = {condition.value: condition for condition in Condition}
    for name in (names := [name.strip() for name in text.split(",")]):
        if name not in known:
            raise UserError(f"--conditions: there is no '{name}'; there are {', '.join(known)}")
    return [known[name] for name in names]


def layers_of(text: str, num_layers: int) -> range:
    """Return the layers that `--layers` names: `all`, `4`, `4-7` or `50%-100%`.

    Raises MethodError: not such a text, or layers that the model does not have; UserError: a part of the
    depth that rounds to no layer.
    """
    layers = range(num_layers) if text == "all" else layer_range(text, num_layers)
    if not layers:
        raise UserError(f"--layers {text} is no layer at all of the model's {num_layers}; give a larger part")
    return layers
