"""Query, key and value rows of a layer for every kind of projection, with adapters folded in.

    W_q ← s_h (W_q + B_q A_q),   W_k ← W_k + B_k A_k    (`megatron_patches.attention.adapters`)

Folding is done in float64 from the weights in the run's compute dtype. Adapters that cannot be
folded keep weights of their own, the corrections of `modeling_ora`; scales that follow them are
folded into the corrections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_patches.attention.adapters import Heads
from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.orthonormal import ROLES, Role
from megatron_patches.recipe.adapters import ADAPTERS
from megatron_patches.recipe.policy import QKPolicy
from pretrain.errors import UserError
from pretrain.export.names import Part


def rows(attention: SelfAttention, part: Part) -> torch.Tensor:
    """Return the rows of a layer, in the order of the heads.

    Returns:
        `[heads or groups, head_dim, hidden]`; float64 where adapters were folded in.
    """
    linear, head_dim = attention.linear_qkv, attention.hidden_size_per_attention_head
    if isinstance(linear, FrozenQueryKeyValueLinear):
        if part == "value":
            return linear.value_weight.unflatten(0, (-1, head_dim))
        return _frozen_and_trained(linear, part)
    # megatron-core interleaves its fused weight by group: [q … q k v] of group 0, then of group 1,
    # and so on.
    fused = linear.weight.view(
        attention.config.num_query_groups, -1, head_dim, linear.weight.size(-1)
    )
    if part == "query":
        return fused[:, :-2].flatten(0, 1)
    return fused[:, -2 if part == "key" else -1]


def _frozen_and_trained(linear: FrozenQueryKeyValueLinear, role: Role) -> torch.Tensor:
    """Return the frozen and trained heads of a layer that keeps W_V apart from W_Q and W_K."""
    query, key = (
        rows.unflatten(0, (-1, linear.head_dim)) for _, _, rows in linear.frozen_shards(exact=True)
    )
    frozen: Rows = (query, query[:: linear.queries_per_group] if linear.shared else key)
    trained = _trained_rows(linear)
    if linear.adapters is not None and not linear.adapts_all:
        frozen = _folded(linear, frozen)
    kinds = (frozen, trained)
    whole = tuple(
        _joined(linear, name, tuple(rows[number] for rows in kinds))
        for number, name in enumerate(ROLES)
    )
    if linear.adapters is not None and linear.adapts_all:
        whole = _folded(linear, whole)
    return whole[ROLES.index(role)]


def _joined(linear: FrozenQueryKeyValueLinear, role: Role, kinds: Rows) -> torch.Tensor:
    """Return a role's rows of frozen and trained heads, in the order of the heads."""
    if role not in linear.head_orders:
        return next((rows for rows in kinds if len(rows)), kinds[0])
    joined = torch.cat([rows.to(kinds[0].dtype) for rows in kinds])
    return joined.index_select(0, linear.head_orders[role])


Rows = tuple[torch.Tensor, ...]
"""Rows `[heads, head_dim, hidden]` of queries and of keys."""


def _trained_rows(linear: FrozenQueryKeyValueLinear) -> Rows:
    sizes = [len(linear.heads.trainable[name]) for name in ROLES]
    factors = linear.trained_factors()
    rows: torch.Tensor | None = linear.trained_query_key
    if factors is not None:
        rows = Factors(*(factor.double() for factor in factors)).rows()
    if rows is None:  # no head trains, or low_rank stands in place of the rows
        rows = linear.value_weight.new_zeros(sum(sizes) * linear.head_dim, linear.input_size)
    query, key = rows.unflatten(0, (-1, linear.head_dim)).split(sizes)
    return query, query[:: linear.queries_per_group] if linear.shared else key


def _folded(linear: FrozenQueryKeyValueLinear, rows: Rows) -> Rows:
    """Return rows with adapters folded in, then in float64.

    The adapters are applied to the rows' columns: these are the queries and keys of unit vectors.
    """
    names = folded_adapters(linear)
    if linear.adapters is None or not names:
        return rows
    query, key = (role_rows.double().permute(2, 0, 1).unsqueeze(1) for role_rows in rows)
    shared = {
        name: getattr(linear, name).double().t().unsqueeze(1) for name in linear.shared_adapters
    }
    corrected = linear.adapters.apply_some(names, Heads(query, key), shared)
    return tuple(
        columns.squeeze(1).permute(1, 2, 0) for columns in (corrected.query, corrected.key)
    )


def folded_adapters(linear: torch.nn.Module) -> tuple[str, ...]:
    """Return the adapters that are folded into the rows, which then differ from the bank's.

    A convolution of keys and values commutes with scales of queries.
    """
    adapters = getattr(linear, "adapters", None)
    names: tuple[str, ...] = () if adapters is None else tuple(adapters.steps)
    return tuple(name for name in names if ADAPTERS[name].folded)


Corrections = dict[Part, dict[str, int]]
"""{part: {correction: its width, its taps or 1}}, in the names of `modeling_ora`."""
_WEIGHT_NAMES = {"bias": "bias", "taps": "convolution.taps"}


def corrections_of(policy: QKPolicy, adapted_groups: Collection[int]) -> Corrections:
    """Return the corrections that the classes of `modeling_ora` make in a layer.

    Args:
        adapted_groups: Key heads of the layer that have adapters.

    Raises:
        UserError: an adapter is neither folded into the rows nor one of these corrections.
    """
    sizes_by_part: Corrections = {"query": {}, "key": {}, "value": {}}
    convolved: list[Part] = ["key", "value"] if policy.convolved == "both" else [policy.convolved]
    supported: dict[str, tuple[str, int, Iterable[Part]]] = {
        "query_key_bias": ("bias", 1, ROLES),
        "short_convolution": ("taps", policy.taps, convolved),
    }
    for adapter in policy.corrections if adapted_groups else ():
        if adapter.name in supported:
            correction, size, parts = supported[adapter.name]
            for part in parts:
                sizes_by_part[part][correction] = size
        elif not adapter.folded:
            raise UserError(
                f"attention.adapters has {adapter.name}, which cannot be folded into the rows of "
                "queries and keys, and modeling_ora.py does not compute it: such a run cannot be "
                "exported"
            )
    return sizes_by_part


def corrections(
    attention: SelfAttention, part: Part, sizes: Mapping[str, int], heads: int
) -> dict[str, torch.Tensor]:
    """Return the weights of a layer's corrections, by name.

    Corrections of heads without an adapter change nothing.

    Args:
        sizes: {correction: size} of the part.
        heads: Heads of this part in the class; each head of the run is repeated to make as many.
    """
    linear, config = attention.linear_qkv, attention.config
    head_dim, groups = attention.hidden_size_per_attention_head, config.num_query_groups
    neutral = {
        "bias": torch.zeros(head_dim),
        "convolution.taps": torch.eye(1, sizes.get("taps", 1)).expand(head_dim, -1),
    }
    members = config.num_attention_heads // groups if part == "query" else 1
    adapted = _own_corrections(linear, part, sizes) if sizes else {}
    weights = {}
    for name in (_WEIGHT_NAMES[correction] for correction in sizes):
        # Heads without an adapter keep the neutral value.
        per_head = neutral[name].double()
        whole = per_head.repeat(groups, members, *[1] * per_head.dim())
        whole[linear.adapted_groups] = adapted[name].detach().double().unflatten(0, (-1, members))
        repeated = whole.flatten(0, 1).repeat_interleave(heads // (groups * members), dim=0)
        weights[name] = repeated.flatten(0, 1)
    return weights


@torch.no_grad()
def _own_corrections(
    linear: FrozenQueryKeyValueLinear, part: Part, sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the weights `[heads, …]` of the adapted heads, later adapters folded in."""
    adapters, head_dim = linear.adapters, linear.head_dim
    assert adapters is not None
    weights: dict[str, torch.Tensor] = {}
    if "taps" in sizes:
        taps = adapters.get_parameter(f"{part}_taps")
        weights["convolution.taps"] = taps.unflatten(0, (-1, head_dim))
    if "bias" in sizes:
        groups = len(linear.adapted_groups)
        heads = (groups * linear.queries_per_group, groups)
        query, key = (torch.zeros(1, 1, count, head_dim).double() for count in heads)
        names = tuple(adapters.steps)
        following = [
            name for name in names[names.index("query_key_bias") :] if name != "short_convolution"
        ]
        # Adapters are affine: on zeros they leave the bias, transformed by the adapters behind it.
        biases = adapters.apply_some(following, Heads(query, key), {})
        weights["bias"] = (biases.query if part == "query" else biases.key)[0, 0]
    return weights
