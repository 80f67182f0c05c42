"""The Query/Key policy: what a variant of attention *is*, as data, and the table of named variants.

A variant is a point on a few independent axes (how the scores are made, how W_Q and W_K start, whether they
train).
Nothing else in the program asks for a variant by name: `install` and `initialize` read the axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_patches.errors import MethodError
from megatron_patches.orthonormal import CONSTRUCTIONS, SCOPES

Init = Literal["default", "orthogonal", "gaussian"]

DEFAULT_PENALTY = 0.01


@dataclass(frozen=True)
class QKPolicy:
    """One choice on every Query/Key axis.

    Attributes:
        init: how W_Q and W_K start. `default`: N(0, init_std²) like every other weight; `orthogonal`:
            orthonormal rows; `gaussian`: independent normal entries of standard deviation `gaussian_std`.
        trainable: whether W_Q and W_K learn. If not, they are buffers that no optimizer ever sees.
        scope: for `orthogonal`, whether rows are orthonormal within each `head` or across the whole `layer`.
        construction: for `orthogonal`, how the rows are made (`orthonormal.CONSTRUCTIONS`).
        gaussian_std: for `gaussian`; None matches the orthonormal scale, 1/sqrt(hidden_size), so that E|q|²
            is equal.
        penalty: λ of the term that pulls trainable rows back to orthonormal ones (see `penalty`); 0: none.
    """

    init: Init
    trainable: bool
    scope: str = "head"
    construction: str = "qr"
    gaussian_std: float | None = None
    penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.init == "default" and not self.trainable:
            raise MethodError(
                "attention: init 'default' with trainable=false is not a variant; "
                "use 'gaussian_naive' for frozen N(0, 0.02²)"
            )
        if self.scope not in SCOPES:
            raise MethodError(f"attention.scope is '{self.scope}'; known scopes: {', '.join(SCOPES)}")
        if self.construction not in CONSTRUCTIONS:
            known = ", ".join(CONSTRUCTIONS)
            raise MethodError(
                f"attention.construction is '{self.construction}'; known constructions: {known}"
            )
        if self.gaussian_std is not None and (self.init != "gaussian" or self.gaussian_std <= 0):
            raise MethodError("attention.gaussian_std must be positive and belongs to init 'gaussian' only")
        if self.penalty and not (self.init == "orthogonal" and self.trainable):
            raise MethodError("attention.penalty belongs to trainable Q and K that start orthonormal")

    @property
    def frozen(self) -> bool:
        """True if W_Q and W_K never change."""
        return not self.trainable


VARIANTS: dict[str, QKPolicy] = {
    "vanilla": QKPolicy(init="default", trainable=True),
    "orthogonal": QKPolicy(init="orthogonal", trainable=False),
    "orthogonal_trainable": QKPolicy(init="orthogonal", trainable=True),
    "gaussian": QKPolicy(init="gaussian", trainable=False),
    "gaussian_naive": QKPolicy(init="gaussian", trainable=False, gaussian_std=0.02),
    "orthogonal_penalty": QKPolicy(init="orthogonal", trainable=True, penalty=DEFAULT_PENALTY),
    "hadamard": QKPolicy(init="orthogonal", trainable=False, construction="hadamard"),
    "dct": QKPolicy(init="orthogonal", trainable=False, construction="dct"),
}


def policy_for(
    variant: str,
    *,
    scope: str | None = None,
    construction: str | None = None,
    gaussian_std: float | None = None,
    penalty: float | None = None,
) -> QKPolicy:
    """The policy of a named variant, with the axes that are given (not None) replaced.

    Raises:
        MethodError: unknown variant, or axes that do not go together.
    """
    if variant not in VARIANTS:
        raise MethodError(f"attention.variant is '{variant}'; known variants: {', '.join(VARIANTS)}")
    policy = VARIANTS[variant]
    if policy.init != "orthogonal" and (scope is not None or construction is not None):
        raise MethodError(f"attention.scope and attention.construction do not apply to variant '{variant}'")
    if penalty is not None and not policy.penalty:
        raise MethodError(f"attention.penalty does not apply to variant '{variant}'; use orthogonal_penalty")
    given = {"scope": scope, "construction": construction, "gaussian_std": gaussian_std, "penalty": penalty}
    return replace(policy, **{axis: value for axis, value in given.items() if value is not None})  # type: ignore[arg-type]
