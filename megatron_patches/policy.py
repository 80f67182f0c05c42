"""The attention policy: what a variant of attention *is*, as data, and the table of named variants.

A variant is a point on a few independent axes (how the scores are made, how W_Q and W_K start, which of them
train, what is added to the frozen ones). Nothing else in the program asks for a variant by name: `install`
and `initialize` read the axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_patches.errors import MethodError
from megatron_patches.layers import layer_range, spread
from megatron_patches.orthonormal import CONSTRUCTIONS, SCOPES, BankRecipe

Init = Literal["default", "orthogonal", "gaussian"]
ADAPTERS = ("logit_scale", "qk_norm", "core", "low_rank")


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
        frozen_heads: where `trainable` is false, (layers, fraction of their heads) that are frozen, in the
            notation of `layers`; all other heads start by `default` and train. Empty: every head is frozen.
            With grouped-query attention the fraction is of the groups, each with its query heads.
        adapters: small trainable corrections of frozen queries and keys, names of ADAPTERS (see `adapters`).
        low_rank: rank of the adapter of that name.
    """

    init: Init
    trainable: bool
    scope: str = "head"
    construction: str = "qr"
    gaussian_std: float | None = None
    frozen_heads: tuple[tuple[str, float], ...] = ()
    adapters: tuple[str, ...] = ()
    low_rank: int = 8

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
        self._check_adapters()

    def _check_adapters(self) -> None:
        unknown = [name for name in self.adapters if name not in ADAPTERS]
        if unknown:
            raise MethodError(
                f"attention.adapters names '{unknown[0]}'; known adapters: {', '.join(ADAPTERS)}"
            )
        if len(set(self.adapters)) < len(self.adapters):
            raise MethodError(f"attention.adapters names one twice: {', '.join(self.adapters)}")
        if self.low_rank < 1:
            raise MethodError(f"attention.low_rank is {self.low_rank}; a rank is at least 1")

    def frozen_groups(self, layer: int, num_layers: int, num_groups: int) -> tuple[int, ...]:
        """The key heads of a layer whose W_K is frozen, with W_Q of their query heads; both from 0.

        Raises:
            MethodError: `frozen_heads` names no layers, names one twice, or no whole number of heads.
        """
        if self.trainable:
            return ()
        if not self.frozen_heads:
            return tuple(range(num_groups))
        try:
            fractions = [
                fraction for text, fraction in self.frozen_heads if layer in layer_range(text, num_layers)
            ]
            if len(fractions) > 1:
                raise MethodError(f"layer {layer} is named twice")
            return spread(sum(fractions), num_groups)
        except MethodError as error:
            raise MethodError(f"attention.frozen_heads: {error}") from None


VARIANTS: dict[str, QKPolicy] = {
    "vanilla": QKPolicy(init="default", trainable=True),
    "orthogonal": QKPolicy(init="orthogonal", trainable=False),
    "orthogonal_trainable": QKPolicy(init="orthogonal", trainable=True),
    "gaussian": QKPolicy(init="gaussian", trainable=False),
    "gaussian_naive": QKPolicy(init="gaussian", trainable=False, gaussian_std=0.02),
    "hybrid": QKPolicy(init="orthogonal", trainable=False, frozen_heads=(("0%-33%", 1.0), ("33%-67%", 0.5))),
}


def policy_for(variant: str, axes: Mapping[str, Any] | None = None) -> QKPolicy:
    """The policy of a named variant, with the axes that are given (not None) replaced.

    Args:
        axes: fields of QKPolicy by name, except init and trainable.

    Raises:
        MethodError: unknown variant, or axes that do not go together.
    """
    if variant not in VARIANTS:
        raise MethodError(f"attention.variant is '{variant}'; known variants: {', '.join(VARIANTS)}")
    policy = VARIANTS[variant]
    given = {axis: value for axis, value in (axes or {}).items() if value is not None}
    if policy.init != "orthogonal" and given.keys() & {"scope", "construction"}:
        raise MethodError(f"attention.scope and attention.construction do not apply to variant '{variant}'")
    if policy.trainable:
        for axis in ("frozen_heads", "adapters"):
            if given.get(axis):
                raise MethodError(
                    f"attention.{axis} does not apply to variant '{variant}', which freezes nothing"
                )
    if "low_rank" in given and "low_rank" not in given.get("adapters", policy.adapters):
        raise MethodError("attention.low_rank is the rank of an adapter; add low_rank to attention.adapters")
    return replace(policy, **given)


def bank_recipe(
    policy: QKPolicy,
    *,
    seed: int,
    hidden_size: int,
    head_dim: int,
    num_attention_heads: int,
    num_query_groups: int,
) -> BankRecipe | None:
    """How the policy's Q and K rows are drawn, or None where they start like every other weight.

    Raises:
        MethodError: the policy is impossible at these sizes.
    """
    if policy.init == "default":
        return None
    return BankRecipe(
        seed=seed,
        hidden_size=hidden_size,
        head_dim=head_dim,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        init=policy.init,
        scope=policy.scope,
        construction=policy.construction,
        gaussian_std=policy.gaussian_std,
    )
