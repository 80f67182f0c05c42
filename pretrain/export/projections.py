"""Query, key and value rows of a layer, head by head, for every kind of projection, with adapters folded in.

    W_q ← s_h C_h (W_q + B_q A_q),   W_k ← W_k + B_k A_k        (see `megatron_patches.attention.adapters`)

Folding is done in float64 from the weights in the run's compute dtype. A norm of queries and keys is not
linear: its gains stay separate, and a logit scale after the norm is folded into the queries' gains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_patches.attention.adapters import Heads
from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.orthonormal import ROLES, Role
from megatron_patches.recipe.adapters import ADAPTERS, in_order
from pretrain.errors import UserError

Part = Literal["query", "key", "value"]
NORM, SCALES = "qk_norm", ("logit_scale", "channel_scale")
"""The adapter that has classes of its own in the export, and those that may come after it."""


def rows(attention: SelfAttention, part: Part) -> torch.Tensor:
    """Return `[heads or groups, head_dim, hidden]` in the order of the heads; float64 where folded."""
    linear, head_dim = attention.linear_qkv, attention.hidden_size_per_attention_head
    if isinstance(linear, FrozenQueryKeyValueLinear):
        if part == "value":
            return linear.value_weight.unflatten(0, (-1, head_dim))
        return _frozen_and_trained(linear, part)
    # megatron-core interleaves its fused weight by group: [q … q k v] of group 0, then of group 1 ...
    fused = linear.weight.view(attention.config.num_query_groups, -1, head_dim, linear.weight.size(-1))
    if part == "query":
        return fused[:, :-2].flatten(0, 1)
    return fused[:, -2 if part == "key" else -1]


def _frozen_and_trained(linear: FrozenQueryKeyValueLinear, role: Role) -> torch.Tensor:
    """Return the frozen and trainable heads of a layer that has W_V apart from W_Q and W_K."""
    frozen, trained = _frozen_rows(linear), _trained_rows(linear)
    if linear.adapters is not None and not linear.adapts_all:
        frozen = _folded(linear, frozen)
    number = ROLES.index(role)
    if role in linear.head_orders:
        both = torch.cat((frozen[number], trained[number].to(frozen[number].dtype)))
        return both.index_select(0, linear.head_orders[role])
    whole = tuple(one if len(one) else other for one, other in zip(frozen, trained, strict=True))
    if linear.adapters is not None and linear.adapts_all:
        whole = _folded(linear, whole)
    return whole[number]


Rows = tuple[torch.Tensor, ...]
"""Rows `[heads, head_dim, hidden]` of queries and of keys."""


def _frozen_rows(linear: FrozenQueryKeyValueLinear) -> Rows:
    query, key = (rows.unflatten(0, (-1, linear.head_dim)) for _, _, rows in linear.frozen_shards(exact=True))
    return query, query[:: linear.queries_per_group] if linear.shared else key


def _trained_rows(linear: FrozenQueryKeyValueLinear) -> Rows:
    sizes = [len(linear.heads.trainable[name]) for name in ROLES]
    factors = linear.trained_factors()
    rows: torch.Tensor | None = linear.trained_query_key
    if factors is not None:
        rows = Factors(*(factor.double() for factor in factors)).rows()
    if rows is None:  # none, or low_rank has their place
        rows = linear.value_weight.new_zeros(sum(sizes) * linear.head_dim, linear.input_size)
    query, key = rows.unflatten(0, (-1, linear.head_dim)).split(sizes)
    return query, query[:: linear.queries_per_group] if linear.shared else key


def _folded(linear: FrozenQueryKeyValueLinear, rows: Rows) -> Rows:
    """Return rows with adapters folded in, then in float64.

    The adapters are applied to the rows' columns, the queries and keys of unit vectors.
    """
    names = folded_adapters(linear)
    if linear.adapters is None or not names:
        return rows
    query, key = (one.double().permute(2, 0, 1).unsqueeze(1) for one in rows)
    shared = {name: getattr(linear, name).double().t().unsqueeze(1) for name in linear.shared_adapters}
    corrected = linear.adapters.apply_some(names, Heads(query, key), shared)
    return tuple(one.squeeze(1).permute(1, 2, 0) for one in (corrected.query, corrected.key))


def folded_adapters(linear: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the adapters that go into the layer's rows: these are then not the bank's."""
    return _around_the_norm(linear)[0]


def _around_the_norm(linear: torch.nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the adapters before the norm of queries and keys, and of those after it."""
    adapters = getattr(linear, "adapters", None)
    names: tuple[str, ...] = () if adapters is None else tuple(adapters.steps)
    norm = names.index(NORM) if NORM in names else len(names)
    return names[:norm], names[norm + 1 :]


def gains(attention: SelfAttention, role: Role) -> torch.Tensor:
    """Return the gains of the query or key norm `[heads or groups, head_dim]`, NaN for heads without norm."""
    linear = attention.linear_qkv
    config, head_dim = attention.config, attention.hidden_size_per_attention_head
    count = config.num_attention_heads if role == "query" else config.num_query_groups
    all_heads = torch.full((count, head_dim), float("nan"), dtype=torch.float64)
    adapters = getattr(linear, "adapters", None)
    if adapters is None or NORM not in adapters.steps:
        return all_heads
    both = (adapters.query_gain, adapters.key_gain)
    query, key = (gain.detach().double().view(1, 1, -1, head_dim) for gain in both)
    scaled = adapters.apply_some(_around_the_norm(linear)[1], Heads(query, key), {})[ROLES.index(role)]
    own = scaled.detach()[0, 0].cpu()
    if len(own) == count:
        return own
    all_heads[list(linear.heads.frozen[role])] = own
    return all_heads


def check_adapters(names: Iterable[str]) -> None:
    """Refuse adapters that no class of transformers computes and that cannot be folded into weights.

    Raises:
        UserError: names the adapter.
    """
    chosen = [adapter.name for adapter in in_order(names)]
    for place, name in enumerate(chosen):
        after_norm = NORM in chosen[:place] and name not in SCALES
        if name != NORM and (after_norm or not ADAPTERS[name].linear):
            reason = f"behind {NORM}" if after_norm else "which is not linear in the layer's input"
            raise UserError(
                f"attention.adapters has {name}, {reason}, and no class of transformers computes attention "
                "so: such a run cannot be exported"
            )
