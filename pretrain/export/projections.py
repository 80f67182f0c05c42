"""Query, key and value rows of a layer, head by head, for every kind of projection, with adapters folded in.

    W_q ← s_h C_h (W_q + B_q A_q),   W_k ← W_k + B_k A_k        (see `megatron_patches.attention.adapters`)

Folding is done in float64 from the weights in the run's compute dtype. A norm of queries and keys is not
linear: its gains stay separate, and a logit scale after the norm is folded into the queries' gains.
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.orthonormal import ROLES, Role

Part = Literal["query", "key", "value"]


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
    """Return the frozen and trainable heads of a layer that has a frozen bank."""
    head_dim = linear.recipe.head_dim
    shards = {name: shard for name, _, shard in linear.frozen_shards(exact=True)}
    frozen = _folded(linear, role, shards[role].unflatten(0, (-1, head_dim)))
    if linear.trained_query_key is None:
        return frozen
    sizes = [len(linear.heads.trainable[name]) for name in ROLES]
    trained = linear.trained_query_key.unflatten(0, (-1, head_dim)).split(sizes)[ROLES.index(role)]
    order = linear.head_orders[role]
    return torch.cat((frozen, trained.to(frozen.dtype))).index_select(0, order)


def _folded(linear: FrozenQueryKeyValueLinear, role: Role, frozen: torch.Tensor) -> torch.Tensor:
    adapters = linear.adapters
    if adapters is None or not folds(linear):
        return frozen
    frozen = frozen.double()
    up = adapters.up_query if role == "query" else adapters.up_key
    if up is not None and linear.low_rank_down is not None:
        down = linear.low_rank_down.double().chunk(2)[ROLES.index(role)]
        frozen = frozen + (up.double() @ down).view_as(frozen)
    if role == "query":
        if adapters.core is not None:
            frozen = torch.einsum("hde,hen->hdn", adapters.core.double(), frozen)
        if adapters.logit_scale is not None and adapters.query_gain is None:
            frozen = frozen * adapters.logit_scale.double()[:, None, None]
    return frozen


def folds(linear: torch.nn.Module) -> bool:
    """Return whether an adapter of the layer is folded into its rows, which are then not the bank's."""
    adapters = getattr(linear, "adapters", None)
    if adapters is None:
        return False
    scaled = adapters.logit_scale is not None and adapters.query_gain is None
    return scaled or adapters.core is not None or adapters.up_query is not None


def gains(attention: SelfAttention, role: Role) -> torch.Tensor:
    """Return the gains of the query or key norm `[heads or groups, head_dim]`, NaN for heads without norm."""
    linear = attention.linear_qkv
    config, head_dim = attention.config, attention.hidden_size_per_attention_head
    count = config.num_attention_heads if role == "query" else config.num_query_groups
    all_heads = torch.full((count, head_dim), float("nan"), dtype=torch.float64)
    adapters = getattr(linear, "adapters", None)
    if adapters is None or adapters.query_gain is None:
        return all_heads
    gain = (adapters.query_gain if role == "query" else adapters.key_gain).detach().double().cpu()
    gain = gain.view(-1, head_dim)
    if role == "query" and adapters.logit_scale is not None:
        gain = gain * adapters.logit_scale.detach().double().cpu()[:, None]
    all_heads[list(linear.heads.frozen[role])] = gain
    return all_heads
