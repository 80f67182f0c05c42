"""The attention policy: a variant of attention as data.

A variant is a point on a few independent axes (the kind of scores, the initial values of W_Q and
W_K, which of them train, additions to the frozen ones). `install` and `initialize` read the axes;
only the table in `variants` knows a variant by name.

A new axis is one more field of `QKPolicy`, declared with `axis`, and the code that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_patches.bank.orthonormal import CONSTRUCTIONS, FACTORED, ROLES, Role
from megatron_patches.errors import MethodError
from megatron_patches.recipe.adapters import ADAPTERS, Adapter, AdapterSizes, in_order
from megatron_patches.recipe.axes import Rule, axes_of, axis
from megatron_patches.recipe.phases import PhaseStart, layer_range, spread, training_begins

Init = Literal["default", "orthogonal", "gaussian", "pretrained", "low_rank"]
FrozenRoles = Literal["both", "query", "key"]
Convolved = Literal["both", "key", "value"]
Scope = Literal["head", "layer"]
Scores = Literal["dot_product", "synthesizer_random", "synthesizer_factorized"]

# Of the powers of ten, the weakest that holds the rows together: after 200 steps of the demo ‖W Wᵀ
# − I‖_F of a head was 0.04 (root mean square), with a tenth of it 0.2, with a hundredth 0.7; ten
# times more cost loss.
DEFAULT_PENALTY = 0.01

_ORTHONORMAL = Rule(
    lambda policy, _: policy.init == "orthogonal",
    "attention.scope and attention.construction do not apply to variant '{variant}'",
)


def _belongs_to(adapter: str, name: str) -> Rule:
    return Rule(
        lambda policy, _: adapter in policy.adapters,
        f"attention.{name} belongs to the adapter {adapter}; add {adapter} to attention.adapters",
    )


@dataclass(frozen=True, kw_only=True)
class QKPolicy:
    """Choice on every Query/Key axis.

    The fields declared with `axis` are also keys of the attention section, with their meanings. The
    others are set by the variant only.

    Attributes:
        init: initial values of W_Q and W_K. `default`: N(0, init_std²) like every other weight;
            `orthogonal`: orthonormal rows; `gaussian`: independent normal entries of standard
            deviation `gaussian_std`; `pretrained`: those of a trained model (see
            `initial_weights_file`); `low_rank`: no W, queries and keys come from the adapter
            low_rank alone, q_h = B_qh A_q x.
        scores: `dot_product`: q·k/√head_dim. `synthesizer_random`: a matrix S_h ∈ R^{T × T} for
            each head, the same for every input; `synthesizer_factorized`: S_h = A_h B_hᵀ. These two
            have no W_Q and no W_K: `trainable` is then about the score matrices (see `recipes`).
        trains_factors: W_Q and W_K are products of two factors that train, instead of trained
            matrices.
    """

    init: Init
    scores: Scores = "dot_product"
    trains_factors: bool = False
    # None matches the orthonormal scale, 1/sqrt(hidden_size), so that E|q|² is equal.
    gaussian_std: float | None = axis(
        None,
        "Standard deviation of Gaussian Q/K; unset: the variant's own, or 1/sqrt(hidden_size).",
        Rule(
            lambda policy, _: policy.init == "gaussian",
            "attention.gaussian_std must be positive and belongs to init 'gaussian' only",
        ),
        gt=0,
    )
    # With grouped-query attention a key head has the rows of the first query head of its group.
    shared: bool = axis(
        False,
        "W_K = W_Q: queries and keys come from one matrix per head.",
        Rule(
            lambda policy, value: not value or policy.may_share,
            "attention.shared does not apply to variant '{variant}'; remove it",
        ),
    )
    # The rows of the other role train, and start as vanilla's.
    frozen_roles: FrozenRoles = axis(
        "both",
        "Which rows are frozen; the others train.",
        Rule(
            lambda policy, value: value == "both" or not (policy.trainable or policy.synthesizer),
            "attention.frozen_roles={value} does not apply to variant '{variant}', which freezes "
            "no rows of queries and keys",
        ),
        Rule(
            lambda policy, value: value == "both" or not (policy.shared or policy.trains_later),
            "attention.frozen_roles={value} contradicts attention.shared and layers that begin to "
            "train (attention.phases); remove it",
        ),
    )
    scope: Scope = axis(
        "head",
        "Rows orthonormal within each head or across the layer; unset: the variant's own.",
        _ORTHONORMAL,
    )
    construction: str = axis(
        "qr",
        f"How orthonormal rows are made: {', '.join(CONSTRUCTIONS)}; unset: the variant's own.",
        _ORTHONORMAL,
        Rule(
            lambda policy, value: policy.construction in ("qr", value),
            "attention.construction={value} contradicts variant '{variant}'; use orthogonal",
        ),
    )
    # λ of the term that pulls trainable rows back to orthonormal ones (see `penalty`); 0: none.
    penalty: float = axis(
        0.0,
        "Factor of the orthogonality penalty, for the variant that has one; unset: its own.",
        Rule(
            lambda policy, _: bool(policy.penalty),
            "attention.penalty does not apply to variant '{variant}'; use orthogonal_penalty",
        ),
        gt=0,
    )
    # Where `trainable` is false, (layers, fraction of their heads) that are frozen, in the notation
    # of `layers`; all other heads start by `default` and train. Empty: every head is frozen. With
    # grouped-query attention the fraction is of the groups, each with its query heads.
    frozen_heads: tuple[tuple[str, float], ...] = axis(
        (),
        "Layers (4, 4-7 or 0%-50%) and the fraction of their heads that is frozen; the other "
        "heads train, as vanilla's. Unset: the variant's own, mostly all.",
        Rule(
            lambda policy, _: not policy.trainable and not policy.synthesizer,
            "attention.frozen_heads does not apply to variant '{variant}', which freezes nothing",
        ),
        min_length=1,
    )
    # Names of ADAPTERS (see `adapters`).
    adapters: tuple[str, ...] = axis(
        (),
        "Adapters of the queries, keys and values of frozen heads (of all heads if none is "
        f"frozen): {', '.join(ADAPTERS)}.",
        Rule(
            lambda policy, _: not policy.synthesizer and not policy.penalty,
            "attention.adapters does not apply to variant '{variant}': it needs queries and keys, "
            "and rows without a penalty",
        ),
    )
    low_rank: int = axis(
        8,
        "Rank of the adapter low_rank, and of variant low_rank; unset: 8.",
        Rule(
            lambda policy, _: "low_rank" in {adapter.name for adapter in policy.corrections},
            "attention.low_rank is the rank of an adapter; add low_rank to attention.adapters",
        ),
        ge=1,
        le=2**20,
    )
    taps: int = axis(
        4,
        "Tokens that the adapter short_convolution sees, the current one included; unset: 4.",
        _belongs_to("short_convolution", "taps"),
        ge=2,
        le=64,
    )
    convolved: Convolved = axis(
        "both",
        "What the adapter short_convolution acts on; unset: both.",
        _belongs_to("short_convolution", "convolved"),
    )
    # Whether W_Q and W_K, or score matrices, learn. If not, they are buffers that no optimizer ever
    # sees. A user chooses this for score matrices only; of W_Q and W_K the variant's name says it.
    trainable: bool = axis(
        False,
        "Whether a synthesizer's score matrices learn; unset: they do.",
        Rule(
            lambda policy, _: policy.synthesizer,
            "attention.trainable is for the score matrices of a synthesizer, not for variant "
            "'{variant}', whose name says what trains; remove it",
        ),
    )
    # Columns of A_h and B_h.
    synthesizer_rank: int = axis(
        8,
        "Rank of a factorized synthesizer's score matrices; unset: 8.",
        Rule(
            lambda policy, _: policy.score_rank is not None,
            "attention.synthesizer_rank does not apply to variant '{variant}'; remove it",
        ),
        ge=1,
    )
    # Layers begin to train from the rows they were frozen with, and are frozen as they are.
    phases: tuple[PhaseStart, ...] = axis(
        (),
        "Query and key rows that freeze or begin to train during the run: a list of {at, freeze, "
        "train, learning_rate_factor, decay_steps}; unset: the variant's.",
        Rule(
            lambda policy, _: policy.has_rows and not (policy.synthesizer or policy.penalty),
            "attention.phases does not apply to variant '{variant}': it needs rows of queries and "
            "keys, without a penalty",
        ),
        Rule(
            lambda policy, value: not policy.trainable or not any(entry.train for entry in value),
            "attention.phases cannot train layers of variant '{variant}', which train from the "
            "start; leave train out, or use a variant that freezes them",
        ),
        min_length=1,
        max_length=100,
    )

    def __post_init__(self) -> None:
        if self.construction not in CONSTRUCTIONS:
            names = ", ".join(CONSTRUCTIONS)
            raise MethodError(
                f"attention.construction is '{self.construction}'; known constructions: {names}"
            )
        self._check_adapters()
        self._check_trained_later()
        if self.freezes_one_role and any(0 < share < 1 for _, share in self.frozen_heads):
            raise MethodError(
                f"attention.frozen_roles={self.frozen_roles} freezes that role of whole layers; "
                "give attention.frozen_heads 0 or 1 for its layers"
            )

    def _check_trained_later(self) -> None:
        if not self.trains_later:
            return
        if self.adapters or any(0 < share < 1 for _, share in self.frozen_heads):
            raise MethodError(
                "attention.phases trains whole layers, without adapters; leave "
                "attention.adapters unset, and give attention.frozen_heads 0 or 1 for its layers"
            )
        if self.structured or self.shared or self.freezes_one_role:
            raise MethodError(
                "attention.phases trains layers whose rows of queries and keys are frozen as whole "
                "matrices; leave attention.shared and attention.frozen_roles unset, and use "
                "monarch_trainable for factors that train"
            )

    def _check_adapters(self) -> None:
        unknown = [name for name in self.adapters if name not in ADAPTERS]
        if unknown:
            raise MethodError(
                f"attention.adapters names '{unknown[0]}'; known adapters: {', '.join(ADAPTERS)}"
            )
        if len(set(self.adapters)) < len(self.adapters):
            raise MethodError(f"attention.adapters names one twice: {', '.join(self.adapters)}")
        if not self.has_rows and "low_rank" in self.adapters:
            raise MethodError(
                "attention.adapters names low_rank, which variant low_rank is made of already"
            )

    @property
    def freezes_one_role(self) -> bool:
        """Return whether only queries or only keys have frozen rows, and the others train."""
        return self.frozen_roles != "both"

    @property
    def trains_later(self) -> bool:
        """Return whether frozen layers begin to train in the course of the run."""
        return any(entry.train is not None for entry in self.phases)

    @property
    def training_in_words(self) -> str:
        """Return whether queries and keys train, for a table of variants."""
        if self.trainable:
            return "trained"
        if self.trains_later:
            return "frozen at first"
        return "partly frozen" if self.frozen_heads else "frozen"

    @property
    def synthesizer(self) -> bool:
        """Return whether scores are learned matrices, without queries and keys."""
        return self.scores != "dot_product"

    @property
    def structured(self) -> bool:
        """Return whether inputs are multiplied by two factors of the rows, not by the rows."""
        factored = self.init == "orthogonal" and self.construction in FACTORED
        return factored and (self.trains_factors or not self.trainable)

    @property
    def only_frozen_factors(self) -> bool:
        """Return whether frozen heads consist of the factors' products, without adapters."""
        return self.structured and not self.trainable and not self.adapters

    @property
    def has_rows(self) -> bool:
        """Return whether W_Q and W_K exist; if not, low_rank makes queries and keys."""
        return self.init != "low_rank"

    @property
    def may_share(self) -> bool:
        """Return whether keys can have the rows of queries."""
        other = (
            self.synthesizer
            or self.penalty
            or self.trains_later
            or self.init in ("pretrained", "low_rank")
        )
        return not other

    @property
    def corrections(self) -> tuple[Adapter, ...]:
        """Return the adapters in the order of application, that of variant low_rank included."""
        return in_order(self.adapters if self.has_rows else (*self.adapters, "low_rank"))

    def adapter_sizes(self, hidden_size: int, head_dim: int) -> AdapterSizes:
        """Return what the weights of adapters depend on."""
        return AdapterSizes(
            hidden_size,
            head_dim,
            rank=self.low_rank,
            alone=not self.has_rows,
            taps=self.taps,
            convolved=self.convolved,
        )

    @property
    def frozen_row_roles(self) -> tuple[Role, ...]:
        """Return the roles whose frozen rows are held; shared rows are held as the query's."""
        if self.shared:
            return ("query",)
        return ROLES if self.frozen_roles == "both" else (self.frozen_roles,)

    def adapted_groups(self, frozen_groups: tuple[int, ...], num_groups: int) -> tuple[int, ...]:
        """Return the groups of a layer that adapters correct.

        Args:
            frozen_groups: numbers of the key heads that are frozen, with their query heads.

        Returns:
            The frozen groups, or all of them if nothing freezes.
        """
        return tuple(range(num_groups)) if self.trainable else frozen_groups

    @property
    def score_rank(self) -> int | None:
        """Return the rank of factorized scores; None for other scores."""
        return self.synthesizer_rank if self.scores == "synthesizer_factorized" else None

    def frozen_groups(
        self, num_layers: int, num_groups: int, phase: int = 0
    ) -> list[tuple[int, ...]]:
        """Return the frozen key heads of each layer, from 0; their query heads are frozen too.

        Args:
            phase: number of the phase, from 0. Rows that are frozen in the course of the run do not
                count, see `kept_from`.

        Raises:
            MethodError: `frozen_heads` or `phases` names no layers, a layer twice, or no whole
                number of heads.
        """
        frozen = self._frozen_at_start(num_layers, num_groups)
        # Rows that begin to train never count as frozen again; `kept_from` says when they stop.
        begins = training_begins(self.phases, frozen)
        return [
            () if begin is not None and begin <= phase else groups
            for begin, groups in zip(begins, frozen, strict=True)
        ]

    def _frozen_at_start(self, num_layers: int, num_groups: int) -> list[tuple[int, ...]]:
        if self.trainable or self.synthesizer:
            return [()] * num_layers
        if not self.frozen_heads:
            return [tuple(range(num_groups))] * num_layers
        try:
            return self._frozen_parts(num_layers, num_groups)
        except MethodError as error:
            raise MethodError(f"attention.frozen_heads: {error}") from None

    def trained_from(self, num_layers: int, num_groups: int) -> list[int | None]:
        """Return for each layer the phase in which its frozen rows begin to train, or None.

        Raises:
            MethodError: as `frozen_groups`.
        """
        return training_begins(self.phases, self._frozen_at_start(num_layers, num_groups))

    def kept_from(self, num_layers: int, num_groups: int) -> list[int | None]:
        """Return for each layer the phase from which trained rows are frozen as they are, or None.

        Raises:
            MethodError: as `frozen_groups`.
        """
        kept_from: list[int | None] = [None] * num_layers
        for phase, entry in enumerate(self.phases, start=1):
            # An entry freezes what trained until then: the state of the phase before counts.
            frozen = self.frozen_groups(num_layers, num_groups, phase - 1)
            for layer in entry.named("freeze", num_layers):
                if kept_from[layer] is None and self._trained_rows(frozen[layer], num_groups):
                    kept_from[layer] = phase
        return kept_from

    def _trained_rows(self, frozen: tuple[int, ...], num_groups: int) -> frozenset[tuple[str, int]]:
        """Return (role, key head) of the rows that train where these key heads are frozen."""
        roles = ("query",) if self.shared else ROLES
        return frozenset(
            (role, group)
            for group in range(num_groups)
            for role in roles
            if group not in frozen or role not in self.frozen_row_roles
        )

    def fixed_groups(
        self, num_layers: int, num_groups: int, phase: int
    ) -> list[dict[Role, tuple[int, ...]]]:
        """Return for each layer and role the key heads whose rows do not train in a phase.

        Args:
            phase: number of the phase in `phases`, from 0.

        Raises:
            MethodError: as `frozen_groups`.
        """
        fixed = []
        sizes = num_layers, num_groups
        for groups, start in zip(
            self.frozen_groups(*sizes, phase), self.kept_from(*sizes), strict=True
        ):
            kept = start is not None and start <= phase
            trained = frozenset() if kept else self._trained_rows(groups, num_groups)
            # Shared keys have no rows of their own: the query's rows decide.
            row_roles = {role: "query" if self.shared else role for role in ROLES}
            fixed.append(
                {
                    role: tuple(g for g in range(num_groups) if (row_role, g) not in trained)
                    for role, row_role in row_roles.items()
                }
            )
        return fixed

    def _frozen_parts(self, num_layers: int, num_groups: int) -> list[tuple[int, ...]]:
        frozen: list[tuple[int, ...] | None] = [None] * num_layers
        for layers, heads in [
            (layer_range(text, num_layers), fraction) for text, fraction in self.frozen_heads
        ]:
            repeated = [layer for layer in layers if frozen[layer] is not None]
            if repeated:
                raise MethodError(f"layer {repeated[0]} is named twice")
            # A percentage may round to no layer at all in a shallow model.
            groups = spread(heads, num_groups) if layers else ()
            frozen[layers.start : layers.stop] = [groups] * len(layers)
        return [groups or () for groups in frozen]


AXES = axes_of(QKPolicy)
"""The axes of the attention section, in its order."""
