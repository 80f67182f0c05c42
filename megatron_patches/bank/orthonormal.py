"""The frozen Query/Key bank: (seed, layer, role, head) -> rows. Pure, CPU, float64.

Every head has a counter-based random stream of its own, so no head depends on which others were
made, nor on their place or order. With the default construction, `qr`, and with `hadamard`, `dct`
and `monarch`, the bits are also the same on every IEEE machine whatever its BLAS and thread count
(see `exact`, `structured`, `factors`): a run may move between CPU models and tensor-parallel sizes
and find its bank again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
from threadpoolctl import threadpool_limits

from megatron_patches.bank.exact import FloatArray, orthonormalize_rows
from megatron_patches.bank.factors import LayerFactors, block_sizes, layer_factors
from megatron_patches.bank.gaussian import cayley_rows, householder_rows, normal, svd_rows
from megatron_patches.bank.structured import dct_rows, hadamard_rows, is_power_of_two
from megatron_patches.errors import MethodError

Role = Literal["query", "key"]

SCOPES = ("head", "layer")
INITS = ("orthogonal", "gaussian", "pretrained")
ROLES: tuple[Role, ...] = ("query", "key")
"""Roles that have streams, by their numbers there."""
FACTORED = ("monarch",)
"""Constructions of two factors instead of a matrix (see `factors`)."""

# First word of each stream's key: head and layer streams never coincide, nor with another use of
# the seed.
STREAM_DOMAINS: Mapping[str, int] = MappingProxyType({"head": 0x4F5241, "layer": 0x4F5242})


@dataclass(frozen=True)
class BankRecipe:
    """Recipe of a frozen bank: with (layer, role, head) it determines every row.

    Attributes:
        seed: seed of the random streams, 0 or more.
        hidden_size: width of the residual stream.
        head_dim: width of a head.
        num_attention_heads: query heads of a layer.
        num_query_groups: key heads of a layer.
        init: `orthogonal`, `gaussian`, or `pretrained`: read from a file (see `shards`), not drawn.
        scope: for `orthogonal`: rows orthonormal within each `head`, or across all heads of a
            `layer`'s role.
        construction: for `orthogonal`: one of CONSTRUCTIONS.
        gaussian_std: for `gaussian`; None is 1/sqrt(hidden_size), which makes E|q|² that of
            orthonormal rows.
        given_sha256: for `pretrained`: the SHA-256 of the file's header.
        given_path: for `pretrained`: the path of the file, which is not part of the bank's
            identity.

    Raises:
        MethodError: an impossible shape or an unknown name; the message says which.
    """

    seed: int
    hidden_size: int
    head_dim: int
    num_attention_heads: int
    num_query_groups: int
    init: str = "orthogonal"
    scope: str = "head"
    construction: str = "qr"
    gaussian_std: float | None = None
    given_sha256: str | None = None
    given_path: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise MethodError(
                f"seed={self.seed} is negative; the frozen bank needs a seed of 0 or more"
            )
        for name in ("hidden_size", "head_dim", "num_attention_heads", "num_query_groups"):
            if getattr(self, name) < 1:
                raise MethodError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_attention_heads % self.num_query_groups:
            raise MethodError(
                f"num_attention_heads={self.num_attention_heads} is not divisible by "
                f"num_query_groups={self.num_query_groups}"
            )
        for name, choices in (("init", INITS), ("scope", SCOPES), ("construction", CONSTRUCTIONS)):
            if getattr(self, name) not in choices:
                raise MethodError(f"{name} is '{getattr(self, name)}'; known: {', '.join(choices)}")
        if self.gaussian_std is not None and (
            self.init != "gaussian" or not 0 < self.gaussian_std < math.inf
        ):
            raise MethodError(
                f"gaussian_std={self.gaussian_std} must be positive and belongs to init "
                "'gaussian' only"
            )
        if self.init == "orthogonal":
            self._check_orthonormal_shape()

    def _check_orthonormal_shape(self) -> None:
        if self.head_dim > self.hidden_size:
            raise MethodError(
                f"head_dim={self.head_dim} is larger than hidden_size={self.hidden_size}: "
                "that many orthonormal rows do not exist; use a smaller head_dim"
            )
        rows = self.num_attention_heads * self.head_dim
        if self.scope == "layer" and rows > self.hidden_size:
            raise MethodError(
                f"num_attention_heads * head_dim = {rows} is larger than "
                f"hidden_size={self.hidden_size}: scope 'layer' cannot do that; use scope 'head'"
            )
        if self.construction == "hadamard" and not is_power_of_two(self.hidden_size):
            raise MethodError(
                f"hidden_size={self.hidden_size} is not a power of two: construction 'hadamard' "
                "needs one; use construction 'dct', which takes any size"
            )
        if self.construction in FACTORED:
            if self.scope != "layer":
                raise MethodError(
                    f"construction '{self.construction}' makes all rows of a layer together: use "
                    "scope 'layer', or another construction"
                )
            block_sizes(self.hidden_size, self.head_dim)

    def as_dict(self) -> dict[str, int | float | str | None]:
        """Return the fields as plain values; `BankRecipe(**values)` makes an equal recipe."""
        values = asdict(self)
        # A file is identified by its digest; where it lies may differ between machines.
        del values["given_path"]
        if self.given_sha256 is None:
            del values["given_sha256"]
        return values

    @property
    def structured(self) -> bool:
        """Return whether inputs are multiplied by small factors of the rows instead of the rows."""
        return self.init == "orthogonal" and self.construction in FACTORED

    def num_heads(self, role: Role) -> int:
        """Return the number of heads of one role in a layer: query heads, or key heads (groups)."""
        return self.num_query_groups if role == "key" else self.num_attention_heads


def rows_of_heads(recipe: BankRecipe, layer: int, role: Role, heads: Sequence[int]) -> FloatArray:
    """Draw W of several heads of one role, stacked.

    The result is that of stacking the heads; with scope "layer" the layer's one decomposition is
    made only once.

    Args:
        layer: number of the layer, from 0.
        heads: numbers of the heads, from 0.

    Returns:
        Float64 `[len(heads) * head_dim, hidden_size]`.

    Raises:
        MethodError: there is no such layer, role or head.
    """
    check_place(recipe, layer, role, heads)
    assert recipe.init != "pretrained", "these rows are read, not drawn: see `shards`"
    if recipe.structured:
        return factors_of_heads(recipe, layer, [(role, heads)]).rows()
    head_dim, hidden_size = recipe.head_dim, recipe.hidden_size
    construct = _gaussian_head if recipe.init == "gaussian" else _CONSTRUCTORS[recipe.construction]
    rows = np.empty((len(heads), head_dim, hidden_size))
    # With more threads LAPACK changes the last bits of the other constructions; qr only gains no
    # speed.
    with threadpool_limits(limits=1, user_api="blas"):
        if recipe.init == "orthogonal" and recipe.scope == "layer":
            num_heads = recipe.num_heads(role)
            stream = _stream(recipe.seed, "layer", layer, role)
            layer_rows = construct(stream, hidden_size, num_heads * head_dim)
            rows[:] = layer_rows.reshape(num_heads, head_dim, hidden_size)[list(heads)]
        else:
            for rows_of_head, head in zip(rows, heads, strict=True):
                rows_of_head[:] = construct(
                    _stream(recipe.seed, "head", layer, role, head=head), hidden_size, head_dim
                )
    # Scaled after the draw: all inits share the stream of rounded normal deviates.
    if recipe.init == "gaussian":
        rows *= 1 / math.sqrt(hidden_size) if recipe.gaussian_std is None else recipe.gaussian_std
    return rows.reshape(-1, hidden_size)


def factors_of_heads(
    recipe: BankRecipe, layer: int, heads: Sequence[tuple[Role, Sequence[int]]]
) -> LayerFactors:
    """Draw the factors of several heads' W from a `structured` recipe.

    Args:
        layer: number of the layer, from 0.
        heads: (role, numbers of heads), in the order of the rows.

    Raises:
        MethodError: there is no such layer, role or head.
    """
    assert recipe.structured
    for role, role_heads in heads:
        check_place(recipe, layer, role, role_heads)
    numbers = [(ROLES.index(role), role_heads) for role, role_heads in heads]
    return layer_factors(
        recipe.seed, layer, hidden_size=recipe.hidden_size, head_dim=recipe.head_dim, heads=numbers
    )


def check_place(recipe: BankRecipe, layer: int, role: str, heads: Sequence[int]) -> None:
    """Refuse a layer, role or head that does not exist.

    Args:
        layer: number of the layer, from 0.
        heads: numbers of the heads, from 0.

    Raises:
        MethodError: what does not exist.
    """
    if role not in ROLES:
        raise MethodError(f"role is '{role}'; known roles: {', '.join(ROLES)}")
    if layer < 0:
        raise MethodError(f"layer={layer} is negative; layers count from 0")
    num_heads = recipe.num_heads(role)
    for head in heads:
        if not 0 <= head < num_heads:
            raise MethodError(
                f"{role} head={head} does not exist; there are {num_heads}, counted from 0"
            )


def _stream(
    seed: int, scope: str, layer: int, role: Role, head: int | None = None
) -> np.random.Generator:
    """Return the random stream of a head or of a layer's role: Philox keyed by its position."""
    spawn_key: tuple[int, ...] = (STREAM_DOMAINS[scope], layer, ROLES.index(role))
    if head is not None:
        spawn_key = (*spawn_key, head)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=spawn_key)))


def _gaussian_head(stream: np.random.Generator, hidden_size: int, num_rows: int) -> FloatArray:
    return normal(stream, hidden_size, num_rows).T


def _qr(stream: np.random.Generator, hidden_size: int, num_rows: int) -> FloatArray:
    """Draw Qᵀ of A = Q R with diag(R) > 0.

    Haar (Mezzadri, Notices AMS 54, 2007), the same bits everywhere.

    A draw too close to singular is drawn again. Only (nearly) square shapes have such draws: about
    1 in 1000 at 64 × 64 and 1 in 100 at 256 × 256. For a Gaussian A, Q is independent of R and so
    of this choice: it stays Haar.
    """
    while True:
        rows = orthonormalize_rows(normal(stream, hidden_size, num_rows).T)
        if rows is not None:
            return rows


Constructor = Callable[[np.random.Generator, int, int], FloatArray]
_CONSTRUCTORS: Mapping[str, Constructor] = MappingProxyType(
    {
        "qr": _qr,
        "svd": svd_rows,
        "householder": householder_rows,
        "cayley": cayley_rows,
        "hadamard": hadamard_rows,
        "dct": dct_rows,
    }
)
CONSTRUCTIONS = (*_CONSTRUCTORS, *FACTORED)
