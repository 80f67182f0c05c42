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
from megatron_patches.score_recipe import ScoreRecipe
from megatron_patches.unfreeze import Unfreeze, phase_of_layer

Init = Literal["default", "orthogonal", "gaussian"]
Scores = Literal["dot_product", "synthesizer_random", "synthesizer_factorized"]
ADAPTERS = ("logit_scale", "qk_norm", "core", "low_rank")

# Of the powers of ten, the weakest that holds the rows together: after 200 steps of the demo ‖W Wᵀ − I‖_F of
# a head was 0.04 (root mean square), with a tenth of it 0.2, with a hundredth 0.7; ten times more cost loss.
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
        frozen_heads: where `trainable` is false, (layers, fraction of their heads) that are frozen, in the
            notation of `layers`; all other heads start by `default` and train. Empty: every head is frozen.
            With grouped-query attention the fraction is of the groups, each with its query heads.
        adapters: small trainable corrections of frozen queries and keys, names of ADAPTERS (see `adapters`).
        low_rank: rank of the adapter of that name.
        scores: `dot_product`: q·k/√head_dim. `synthesizer_random`: a matrix S_h ∈ R^{T × T} for each head,
            the same for every input; `synthesizer_factorized`: S_h = A_h B_hᵀ. These two have no W_Q and no
            W_K: `trainable` then speaks of the score matrices (see `score_recipe`).
        synthesizer_rank: columns of A_h and B_h.
        unfreeze: the schedule by which frozen layers become trainable, from the rows they were frozen with.
        phase: where in that schedule a model is; 0: before its first entry.
    """

    init: Init
    trainable: bool
    scope: str = "head"
    construction: str = "qr"
    gaussian_std: float | None = None
    penalty: float = 0.0
    frozen_heads: tuple[tuple[str, float], ...] = ()
    adapters: tuple[str, ...] = ()
    low_rank: int = 8
    scores: Scores = "dot_product"
    synthesizer_rank: int = 8
    unfreeze: tuple[Unfreeze, ...] = ()
    phase: int = 0

    def __post_init__(self) -> None:
        if self.init == "default" and not self.trainable and not self.synthesizer:
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
        self._check_adapters()
        if self.unfreeze and (self.frozen_heads or self.adapters):
            raise MethodError(
                "attention.unfreeze is for whole layers that are all frozen at first, without adapters; "
                "leave attention.frozen_heads and attention.adapters unset"
            )

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

    @property
    def synthesizer(self) -> bool:
        """True if scores are learned matrices, so that there are no queries and keys."""
        return self.scores != "dot_product"

    @property
    def score_rank(self) -> int | None:
        """Rank of factorized scores; None for all others."""
        return self.synthesizer_rank if self.scores == "synthesizer_factorized" else None

    def frozen_groups(self, layer: int, num_layers: int, num_groups: int) -> tuple[int, ...]:
        """The key heads of a layer whose W_K is frozen, with W_Q of their query heads; both from 0.

        Raises:
            MethodError: `frozen_heads` or `unfreeze` names no layers, names one twice, or no whole number of
                heads.
        """
        if self.trainable or self.synthesizer:
            return ()
        if self.unfreeze:
            phase = phase_of_layer(self.unfreeze, layer, num_layers)
            return () if phase is not None and phase <= self.phase else tuple(range(num_groups))
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
    "orthogonal_penalty": QKPolicy(init="orthogonal", trainable=True, penalty=DEFAULT_PENALTY),
    "hadamard": QKPolicy(init="orthogonal", trainable=False, construction="hadamard"),
    "dct": QKPolicy(init="orthogonal", trainable=False, construction="dct"),
    "unfreeze": QKPolicy(
        init="orthogonal",
        trainable=False,
        unfreeze=(Unfreeze(0.3, "50%-100%", 0.5), Unfreeze(0.6, "0%-100%", 0.2)),
    ),
    "hybrid": QKPolicy(init="orthogonal", trainable=False, frozen_heads=(("0%-33%", 1.0), ("33%-67%", 0.5))),
    "synthesizer_random": QKPolicy(init="default", trainable=True, scores="synthesizer_random"),
    "synthesizer_factorized": QKPolicy(init="default", trainable=True, scores="synthesizer_factorized"),
}


def policy_for(variant: str, axes: Mapping[str, Any] | None = None) -> QKPolicy:
    """The policy of a named variant, with the axes that are given (not None) replaced.

    Args:
        axes: fields of QKPolicy by name, except init and scores; trainable for synthesizers only.

    Raises:
        MethodError: unknown variant, or axes that do not go together.
    """
    if variant not in VARIANTS:
        raise MethodError(f"attention.variant is '{variant}'; known variants: {', '.join(VARIANTS)}")
    policy = VARIANTS[variant]
    given = {axis: value for axis, value in (axes or {}).items() if value is not None}
    if policy.init != "orthogonal" and given.keys() & {"scope", "construction"}:
        raise MethodError(f"attention.scope and attention.construction do not apply to variant '{variant}'")
    if policy.construction != "qr" and given.get("construction", policy.construction) != policy.construction:
        raise MethodError(
            f"attention.construction={given['construction']} contradicts variant '{variant}'; use orthogonal"
        )
    if policy.trainable:
        for axis in ("frozen_heads", "adapters"):
            if given.get(axis):
                raise MethodError(
                    f"attention.{axis} does not apply to variant '{variant}', which freezes nothing"
                )
    if "penalty" in given and not policy.penalty:
        raise MethodError(f"attention.penalty does not apply to variant '{variant}'; use orthogonal_penalty")
    if given.get("unfreeze") and not policy.unfreeze:
        raise MethodError(f"attention.unfreeze does not apply to variant '{variant}'; use unfreeze")
    if "low_rank" in given and "low_rank" not in given.get("adapters", policy.adapters):
        raise MethodError("attention.low_rank is the rank of an adapter; add low_rank to attention.adapters")
    if "trainable" in given and not policy.synthesizer:
        raise MethodError(
            f"attention.trainable is for the score matrices of a synthesizer, not for variant '{variant}', "
            "whose name says what trains; remove it"
        )
    if "synthesizer_rank" in given and policy.score_rank is None:
        raise MethodError(f"attention.synthesizer_rank does not apply to variant '{variant}'; remove it")
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


def score_recipe(
    policy: QKPolicy, *, seed: int, num_attention_heads: int, sequence_length: int
) -> ScoreRecipe | None:
    """What the policy's score matrices are, or None where scores are made of queries and keys.

    Raises:
        MethodError: the policy is impossible at these sizes.
    """
    if not policy.synthesizer:
        return None
    return ScoreRecipe(
        seed=seed,
        num_attention_heads=num_attention_heads,
        sequence_length=sequence_length,
        rank=policy.score_rank,
    )
