"""Self-attention with frozen Query and Key projections, which are buffers, and a trainable Value projection.

    q = W_q x,  k = W_k x    (W_q, W_k: regenerated from a recipe, never trained, never saved)
    v = W_v x                (trainable, sharded over heads like the stock layer)

Two additions are possible: some of the heads may have trainable W_q and W_k instead (`HeadSplit`), and the
frozen ones may be corrected by `adapters`.

All products of x share one autograd function, so that the layer performs exactly the collectives of
megatron-core's own column-parallel QKV layer: without sequence parallelism one all-reduce of the input
gradient; with it one all-gather forward, and one all-gather and one reduce-scatter backward. Two
column-parallel layers side by side would double them.

Version-sensitive: takes the place of megatron-core's SelfAttention and of its linear_qkv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType

from megatron_patches.attention.adapters import QueryKeyAdapters
from megatron_patches.attention.products import column_parallel_products
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.monarch_kernel import Tile
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import layer_shard, rank_factors, split_heads
from megatron_patches.engine.compat import mark_tensor_parallel
from megatron_patches.engine.freeze import FROZEN_BUFFERS
from megatron_patches.recipe.adapters import AdapterSizes, in_order
from megatron_patches.recipe.phases import phases_of_layers
from megatron_patches.recipe.policy import QKPolicy


class FrozenQueryKeySelfAttention(SelfAttention):
    """megatron-core's SelfAttention with the fused QKV projection replaced by `FrozenQueryKeyValueLinear`.

    Args:
        policy, recipe: the choice of frozen heads and adapters, and the draw of frozen rows.
        frozen_groups: global numbers of this layer's key heads that are frozen, with their query heads.

    Attributes:
        recomputes_query_key: recompute structured queries and keys in backward instead of keeping them.
    """

    recomputes_query_key = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        policy: QKPolicy,
        recipe: BankRecipe,
        frozen_groups: tuple[int, ...],
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        # linear_qkv does not get the layer number, which is global and from 1; the bank counts from 0.
        linear_qkv = partial(
            FrozenQueryKeyValueLinear,
            policy=policy,
            recipe=recipe,
            frozen_groups=frozen_groups,
            layer=layer_number - 1,
        )
        super().__init__(
            config=config,
            submodules=replace(submodules, linear_qkv=linear_qkv),
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[seq, batch, hidden]` to query, key, value `[seq, batch, heads or groups, head_dim]`."""
        assert key_value_states is None and not output_gate and split_qkv
        if self.recomputes_query_key and torch.is_grad_enabled() and self.linear_qkv.only_structured:
            recompute = partial(self.linear_qkv.queries_and_keys, hidden_states.detach())
            self.core_attention.recompute_query_key = recompute
        return self.linear_qkv(hidden_states)


class FrozenQueryKeyValueLinear(torch.nn.Module):
    """Column-parallel projection to this rank's queries and keys (frozen) and values (trainable).

    Attributes:
        query_key_weight: non-persistent buffer `[(frozen heads + frozen groups) * head_dim, hidden]` in the
            compute dtype. A buffer, not a parameter, because DeepSpeed partitions, gathers, broadcasts and
            saves parameters, frozen or not. None where the bank is structured.
        query_key_right, query_key_left: non-persistent buffers, the `monarch.Factors` of the same rows where
            the bank is structured, else None.
        value_weight: parameter `[groups * head_dim, hidden]`. Every sharded parameter is marked as tensor
            parallel, for DeepSpeed's gradient norm.
        trains_from_bank: `trained_query_key` starts from the rows of the same heads in the bank; False: from
            vanilla's values.
        trained_query_key: parameter `[(trainable heads + trainable groups) * head_dim, hidden]`, or None
            where all heads of this rank are frozen.
        shared_adapters: {parameter: adapter} of the parameters `[rows, hidden]` of adapters that heads share,
            such as low_rank_down.
        adapters: the other parameters of the adapters, or None.
        tile: tile of the kernel that multiplies by structured rows; None, the initial value: two products.
        head_orders: role -> positions of (frozen, then trainable) heads that restore the heads' order; empty
            where all heads of this rank are frozen.
    """

    query_key_weight: torch.Tensor | None
    query_key_right: torch.Tensor | None
    query_key_left: torch.Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str,
        tp_group: dist.ProcessGroup,
        name: str | None = None,
        policy: QKPolicy,
        recipe: BankRecipe,
        frozen_groups: tuple[int, ...],
        layer: int,
    ) -> None:
        super().__init__()
        assert not (bias or gather_output or is_expert), "the frozen projection has no bias and stays sharded"
        self.recipe = recipe
        self.frozen_groups = frozen_groups
        self.layer = layer
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        self.dtype = config.params_dtype
        self.heads = split_heads(
            recipe.num_attention_heads,
            recipe.num_query_groups,
            frozen_groups,
            tp_group.rank(),
            tp_group.size(),
        )
        self.num_groups = recipe.num_query_groups // tp_group.size()
        self.tile: Tile | None = None
        device = torch.cuda.current_device()
        made: dict[str, torch.Tensor] = dict(zip(self._buffer_names(), self.regenerate(), strict=True))
        for name in FROZEN_BUFFERS:
            self.register_buffer(name, made[name].to(device) if name in made else None, persistent=False)
        self.value_weight = self._sharded(self.num_groups, input_size, device)
        self._add_trainable_heads(policy, config.num_layers, input_size, device)
        self._add_adapters(policy, input_size, device)

    def _sharded(self, num_heads: int, input_size: int, device: Any) -> torch.nn.Parameter:
        shape = (num_heads * self.recipe.head_dim, input_size)
        weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=self.dtype))
        mark_tensor_parallel(weight, dim=0)
        return weight

    def _add_trainable_heads(self, policy: QKPolicy, num_layers: int, input_size: int, device: Any) -> None:
        self.trained_query_key: torch.nn.Parameter | None = None
        self.head_orders: dict[Role, torch.Tensor] = {}
        self.trains_from_bank = bool(policy.unfreeze)
        count = sum(len(self.heads.trainable[role]) for role in ROLES)
        if not count:
            return
        self.trained_query_key = self._sharded(count, input_size, device)
        self.head_orders = {role: torch.tensor(self.heads.order(role), device=device) for role in ROLES}
        if policy.unfreeze:
            group = phases_of_layers(policy.unfreeze, num_layers)[self.layer]
            self.trained_query_key.optimizer_group = group  # type: ignore[attr-defined]  # see `freeze`

    def _add_adapters(self, policy: QKPolicy, input_size: int, device: Any) -> None:
        self.adapters: QueryKeyAdapters | None = None
        self.shared_adapters: dict[str, str] = {}
        if not policy.adapters:
            return
        heads, groups = (len(self.heads.frozen[role]) for role in ROLES)
        sizes = AdapterSizes(input_size, self.recipe.head_dim, policy.low_rank)
        self.adapters = QueryKeyAdapters(policy.adapters, heads, groups, sizes, self.dtype, device)
        for adapter in in_order(policy.adapters):
            for weight in adapter.weights(sizes):
                if weight.role is None:
                    made = torch.nn.Parameter(torch.empty(weight.shape, device=device, dtype=self.dtype))
                    # Alike on every rank, but a rank's gradient of it is of its own heads only: see `freeze`.
                    made.partial_gradient = True  # type: ignore[attr-defined]
                    self.register_parameter(weight.name, made)
                    self.shared_adapters[weight.name] = adapter.name

    def _buffer_names(self) -> tuple[str, ...]:
        """Return the names in FROZEN_BUFFERS that hold this layer's frozen rows."""
        any_frozen = any(self.heads.frozen[role] for role in ROLES)
        return FROZEN_BUFFERS[1:] if self.recipe.structured and any_frozen else FROZEN_BUFFERS[:1]

    def regenerate(self) -> tuple[torch.Tensor, ...]:
        """Make this rank's frozen rows, queries then keys, anew on the CPU in the compute dtype.

        Returns:
            The contents of the buffers: the rows, or their two factors.
        """
        if len(self._buffer_names()) > 1:
            return rank_factors(self.recipe, self.layer, self.heads, self.dtype)
        rank, size = self.tp_group.rank(), self.tp_group.size()
        shards = [
            layer_shard(self.recipe, self.layer, role, rank, size, self.dtype, self.frozen_groups)
            for role in ROLES
        ]
        return (torch.cat(shards),)

    def frozen(self) -> torch.Tensor | Factors:
        """Return the frozen rows in the form in which inputs are multiplied by them."""
        if self.query_key_weight is not None:
            return self.query_key_weight
        assert self.query_key_right is not None and self.query_key_left is not None
        return Factors(self.query_key_right, self.query_key_left)

    def frozen_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in memory of this rank's frozen rows."""
        frozen = self.frozen()
        return frozen if isinstance(frozen, Factors) else (frozen,)

    def frozen_shards(self, exact: bool = False) -> Iterator[tuple[Role, tuple[int, ...], torch.Tensor]]:
        """Yield (role, global head numbers, rows `[heads * head_dim, hidden]`) of this rank's frozen heads.

        The rows of a structured bank are multiplied out for this from the factors in memory.

        Args:
            exact: multiply the factors of a structured bank in float64, where no product is rounded.
        """
        rows = self.frozen()
        if isinstance(rows, Factors):
            rows = Factors(*(factor.double() for factor in rows)).rows() if exact else rows.rows()
        query, key = (self.heads.frozen[role] for role in ROLES)
        queries = len(query) * self.recipe.head_dim
        yield "query", query, rows[:queries]
        yield "key", key, rows[queries:]

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[seq(/tp), batch, hidden]` to query, key, value `[seq, batch, heads, head_dim]`."""
        products = self._products(hidden_states)
        query, key = self._split(products["frozen"], self.heads.frozen)
        if self.adapters is not None:
            shared = {name: products[name] for name in self.shared_adapters}
            query, key = self.adapters(query, key, shared)
        if "trained" in products:
            trained_query, trained_key = self._split(products["trained"], self.heads.trainable)
            query = self._in_order("query", query, trained_query)
            key = self._in_order("key", key, trained_key)
        return query, key, products["value"].unflatten(-1, (self.num_groups, self.recipe.head_dim))

    @property
    def only_structured(self) -> bool:
        """Return whether queries and keys of this layer come from structured frozen rows alone."""
        alone = self.adapters is None and self.trained_query_key is None
        return alone and self.query_key_weight is None

    def queries_and_keys(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute queries and keys as `forward` does, if `only_structured`; for use without gradients."""
        (frozen,) = column_parallel_products(
            hidden_states, self.frozen(), self.tp_group, self.sequence_parallel, [], self.tile
        )
        return self._split(frozen, self.heads.frozen)

    def _products(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Multiply the input by every weight of the layer: {name: `[seq, batch, rows of the weight]`}."""
        own = {"value": self.value_weight, "trained": self.trained_query_key}
        own |= {name: getattr(self, name) for name in self.shared_adapters}
        learned = {name: weight for name, weight in own.items() if weight is not None}
        frozen, *others = column_parallel_products(
            hidden_states,
            self.frozen(),
            self.tp_group,
            self.sequence_parallel,
            [*learned.values()],
            self.tile,
        )
        return {"frozen": frozen, **dict(zip(learned, others, strict=True))}

    def _in_order(self, role: Role, frozen: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        """Join frozen and trainable heads `[seq, batch, heads, head_dim]` in the order of their numbers."""
        return torch.cat((frozen, trained), dim=2).index_select(2, self.head_orders[role])

    def _split(
        self, rows: torch.Tensor, heads: Mapping[Role, tuple[int, ...]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split products of query and key rows into queries and keys `[seq, batch, heads, head_dim]`."""
        queries, keys = len(heads["query"]), len(heads["key"])
        rows = rows.unflatten(-1, (queries + keys, self.recipe.head_dim))
        query, key = rows.split((queries, keys), dim=2)
        return query, key
