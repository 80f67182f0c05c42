"""Self-attention with frozen Query and Key projections and a trainable Value projection.

    q = W_q x,  k = W_k x    (W_q, W_k: regenerated from a recipe, never trained, never saved)
    v = W_v x                (trainable, sharded over heads like the stock layer)

Rows of some heads or roles may train instead (`HeadSplit`), keys may share the rows of queries, W_q
and W_k may be trained factors, or missing where low_rank takes their place; and `adapters` may
correct the result.

All products of x share one autograd function, so that the layer performs exactly the collectives of
megatron-core's own column-parallel QKV layer: without sequence parallelism one all-reduce of the
input gradient; with it one all-gather forward, and one all-gather and one reduce-scatter backward.
Two column-parallel layers side by side would double them.

Version-sensitive: takes the place of megatron-core's SelfAttention and of its linear_qkv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType

from megatron_patches.attention.adapters import HeadAdapters, Heads
from megatron_patches.attention.convolution import Reach, reach_of
from megatron_patches.attention.products import column_parallel_products
from megatron_patches.bank.factors import block_sizes
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.monarch_kernel import Tile
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import query_key_rows
from megatron_patches.engine.documents import Visible
from megatron_patches.engine.freeze import FROZEN_BUFFERS
from megatron_patches.errors import MethodError
from megatron_patches.recipe.policy import QKPolicy


class FrozenQueryKeySelfAttention(SelfAttention):
    """megatron-core's SelfAttention with `FrozenQueryKeyValueLinear` for its fused QKV projection.

    megatron-core passes the other arguments of the constructor as it does to its own class.

    Args:
        policy: which heads are frozen, and which adapters correct them.
        recipe: recipe of frozen rows, and of trained ones that start from a bank; None: there are
            none.
        frozen_groups: global numbers of this layer's frozen key heads; their query heads are frozen
            with them.

    Attributes:
        recomputes_query_key: recompute structured queries and keys in backward instead of keeping
            them.

    Raises:
        MethodError: `submodules` has a part that this attention does not apply, such as a norm of
            queries.
    """

    recomputes_query_key = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        policy: QKPolicy,
        recipe: BankRecipe | None,
        frozen_groups: tuple[int, ...],
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        applied = {"linear_qkv", "core_attention", "linear_proj"}
        for field in fields(submodules):
            if field.name not in applied and getattr(submodules, field.name) is not None:
                raise MethodError(
                    f"frozen queries and keys are made without megatron-core's {field.name}; "
                    "leave it out"
                )
        # linear_qkv does not get the layer number, which is global and from 1; the bank counts from
        # 0.
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

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Visible, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as megatron-core's SelfAttention does.

        Short convolutions mix only tokens that the mask lets see each other.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`, cut along seq under sequence parallelism.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a position must not see another,
                the future included, or documents that stand alone; None: causal.
            others: megatron-core's further arguments, such as `packed_seq_params`.

        Returns:
            The output `[seq(/tp), batch, hidden]`, and its bias, which is None.
        """
        self.linear_qkv.look_back_within(attention_mask)
        attended: tuple[torch.Tensor, torch.Tensor | None]
        attended = super().forward(hidden_states, attention_mask, **others)
        return attended

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project hidden states to queries, keys and values.

        megatron-core's SelfAttention calls this method in its own forward.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`.
            key_value_states: for cross-attention in megatron-core; must be None.
            output_gate: for gated attention in megatron-core; must be False.
            split_qkv: must be True.

        Returns:
            This rank's queries `[seq, batch, heads, head_dim]`, keys and values
            `[seq, batch, groups, head_dim]`.
        """
        assert key_value_states is None and not output_gate and split_qkv
        if (
            self.recomputes_query_key
            and torch.is_grad_enabled()
            and self.linear_qkv.only_structured
        ):
            recompute = partial(self.linear_qkv.queries_and_keys, hidden_states.detach())
            self.core_attention.recompute_query_key = recompute
        return self.linear_qkv(hidden_states)


class FrozenQueryKeyValueLinear(torch.nn.Module):
    """Column-parallel projection to this rank's queries and keys (frozen) and values (trainable).

    Attributes:
        query_key_weight: non-persistent buffer `[frozen heads of both roles * head_dim, hidden]` in
            the compute dtype. A buffer, not a parameter, because DeepSpeed partitions, gathers,
            broadcasts and saves parameters, frozen or not. None where the bank is structured.
        query_key_right: non-persistent buffer `[a, m, b]`, the right one of the `monarch.Factors`
            of the same rows where the bank is structured, else None.
        query_key_left: non-persistent buffer `[m, a, a]`, the left one, or None.
        value_weight: parameter `[groups * head_dim, hidden]`.
        trained_query_key: parameter `[trainable heads of both roles * head_dim, hidden]`, or None.
        trained_right_query_key: parameter `[m, a, b]`, with the next one trained factors in the
            place of all rows, or None.
        trained_left_query_key: parameter `[m, a, a]`, or None.
        shared_adapters: {parameter: adapter} of the parameters `[rows, hidden]` of adapters that
            heads share, such as low_rank_down.
        adapters: the other parameters of the adapters, or None.
        tile: tile of the kernel that multiplies by structured rows; None, the initial value: two
            products.
        head_orders: role -> positions of (frozen, then trainable) heads that restore the heads'
            order, of the roles of which a layer freezes some heads and trains others.
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
        recipe: BankRecipe | None,
        frozen_groups: tuple[int, ...],
        layer: int,
    ) -> None:
        super().__init__()
        assert not (bias or gather_output or is_expert), (
            "the frozen projection has no bias and stays sharded"
        )
        self.recipe = recipe
        self.head_dim, self.input_size = config.kv_channels, input_size
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.shared = policy.shared
        self.frozen_groups = frozen_groups
        self.layer = layer
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        self.dtype = config.params_dtype
        sizes = (config.num_attention_heads, config.num_query_groups)
        place = (tp_group.rank(), tp_group.size())
        self.heads = split_heads(
            *sizes, frozen_groups, *place, policy.frozen_row_roles, policy.shared
        )
        self.num_groups = config.num_query_groups // tp_group.size()
        self.tile: Tile | None = None
        device = torch.cuda.current_device()
        made: dict[str, torch.Tensor] = dict(
            zip(self._buffer_names(), self.regenerate(), strict=True)
        )
        for name in FROZEN_BUFFERS:
            self.register_buffer(
                name, made[name].to(device) if name in made else None, persistent=False
            )
        self.value_weight = self._parameter((self.num_groups * self.head_dim, input_size), device)
        self._add_trainable_heads(policy, device)
        self._add_adapters(policy, config, device)

    def _parameter(self, shape: tuple[int, ...], device: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(shape, device=device, dtype=self.dtype))

    def _add_trainable_heads(self, policy: QKPolicy, device: Any) -> None:
        self.trained_query_key: torch.nn.Parameter | None = None
        self.trained_right_query_key: torch.nn.Parameter | None = None
        self.trained_left_query_key: torch.nn.Parameter | None = None
        self.head_orders: dict[Role, torch.Tensor] = {}
        count = sum(len(self.heads.trainable[role]) for role in ROLES)
        if not count or not policy.has_rows:
            return
        rows = count * self.head_dim
        if policy.trains_factors:
            a, b = block_sizes(self.input_size, self.head_dim)
            self.trained_right_query_key = self._parameter((rows // a, a, b), device)
            self.trained_left_query_key = self._parameter((rows // a, a, a), device)
            return
        self.trained_query_key = self._parameter((rows, self.input_size), device)
        heads = self.heads.sharing(self.queries_per_group) if self.shared else self.heads
        self.head_orders = {
            role: torch.tensor(heads.order(role), device=device)
            for role in (ROLES if self.shared else policy.frozen_row_roles)
            if self.frozen_groups and heads.trainable[role]
        }

    def _add_adapters(self, policy: QKPolicy, config: TransformerConfig, device: Any) -> None:
        self.adapters: HeadAdapters | None = None
        self.shared_adapters: dict[str, str] = {}
        self.taps = 0
        self.reach: Reach = None
        adapted = policy.adapted_groups(self.frozen_groups, config.num_query_groups)
        if not policy.corrections or not adapted:
            return
        first = self.tp_group.rank() * self.num_groups
        own = [group - first for group in adapted if 0 <= group - first < self.num_groups]
        groups = len(own)
        self.adapts_all = len(own) == self.num_groups
        self.adapted_groups = torch.tensor(own, dtype=torch.long, device=device)
        sizes = policy.adapter_sizes(self.input_size, self.head_dim)
        self.adapters = HeadAdapters(
            policy.corrections,
            groups * self.queries_per_group,
            num_groups=groups,
            sizes=sizes,
            dtype=self.dtype,
            device=device,
        )
        self.taps = policy.taps if "short_convolution" in policy.adapters else 0
        for adapter in policy.corrections:
            for weight in adapter.weights(sizes):
                if weight.role is None:
                    self.register_parameter(weight.name, self._parameter(weight.shape, device))
                    self.shared_adapters[weight.name] = adapter.name

    def look_back_within(self, visible: Visible) -> None:
        """Keep short convolutions within what an attention mask lets see, from now on."""
        self.reach = reach_of(visible, self.taps) if self.taps else None

    def _buffer_names(self) -> tuple[str, ...]:
        """Return the names in FROZEN_BUFFERS that hold this layer's frozen rows."""
        any_frozen = any(self.heads.frozen[role] for role in ROLES)
        structured = self.recipe is not None and self.recipe.structured
        return FROZEN_BUFFERS[1:] if structured and any_frozen else FROZEN_BUFFERS[:1]

    def regenerate(self) -> tuple[torch.Tensor, ...]:
        """Make this rank's frozen rows anew from the recipe.

        Returns:
            The tensors of the buffers that `_buffer_names` names, on the CPU in the compute dtype:
            rows `[rows, hidden]`, or the two factors of a structured bank.
        """
        frozen = self.heads.frozen
        if self.recipe is None or not any(frozen.values()):
            return (torch.empty(0, self.input_size, dtype=self.dtype),)
        made = query_key_rows(self.recipe, self.layer, frozen, self.dtype)
        return made if isinstance(made, Factors) else (made,)

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

    def frozen_shards(
        self, exact: bool = False
    ) -> Iterator[tuple[Role, tuple[int, ...], torch.Tensor]]:
        """Yield the rows in memory of this rank's frozen heads, first of queries, then of keys.

        Args:
            exact: multiply the factors of a structured bank out in float64, where no product is
                rounded; else in their own type.

        Yields:
            (role, global head numbers, rows `[heads * head_dim, hidden]`).
        """
        rows = self.frozen()
        if isinstance(rows, Factors):
            rows = Factors(*(factor.double() for factor in rows)).rows() if exact else rows.rows()
        query, key = (self.heads.frozen[role] for role in ROLES)
        queries = len(query) * self.head_dim
        yield "query", query, rows[:queries]
        yield "key", key, rows[queries:]

    def trained_factors(self) -> Factors | None:
        """Return the trained factors of all rows, as views of the parameters, if there are any."""
        right, left = self.trained_right_query_key, self.trained_left_query_key
        if right is None or left is None:
            return None
        return Factors(right.transpose(0, 1), left)

    def forward(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project hidden states to this rank's queries, keys and values, adapters applied.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`, cut along seq under sequence parallelism.

        Returns:
            Queries `[seq, batch, heads, head_dim]`, keys and values
            `[seq, batch, groups, head_dim]`.
        """
        products = self._products(hidden_states)
        value = products["value"].unflatten(-1, (self.num_groups, self.head_dim))
        shared = {name: products[name] for name in self.shared_adapters}
        sources = {"frozen": self.heads.frozen, "trained": self.heads.trainable}
        parts = {
            name: self._split(products[name], heads)
            for name, heads in sources.items()
            if name in products
        }
        if self.adapters is not None and not self.adapts_all:
            own = value.index_select(2, self.adapted_groups)
            corrected = self.adapters(Heads(*parts["frozen"], own, self.reach), shared)
            parts["frozen"] = corrected.query, corrected.key
            if corrected.value is not own:
                value = value.index_copy(2, self.adapted_groups, corrected.value)
        if not parts:
            parts["none"] = (value[:, :, :0],) * 2
        query, key = (
            self._joined(role, [part[n] for part in parts.values()]) for n, role in enumerate(ROLES)
        )
        if self.adapters is not None and self.adapts_all:
            query, key, value, _ = self.adapters(Heads(query, key, value, self.reach), shared)
        return query, key, value

    @property
    def only_structured(self) -> bool:
        """Return whether queries and keys of this layer come from structured frozen rows alone."""
        alone = self.adapters is None and self.trained_query_key is None
        return alone and self.query_key_weight is None

    def queries_and_keys(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute queries and keys as `forward` does, for a layer that is `only_structured`.

        Call it without gradients.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`.

        Returns:
            Queries `[seq, batch, heads, head_dim]` and keys `[seq, batch, groups, head_dim]`.
        """
        (frozen,) = column_parallel_products(
            hidden_states,
            self.frozen(),
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            weights=[],
            tile=self.tile,
        )
        return self._split(frozen, self.heads.frozen)

    def _products(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {name: `[seq, batch, rows]`}, the products of the input with every weight."""
        own = {"value": self.value_weight, "trained": self.trained_query_key}
        own |= {name: getattr(self, name) for name in self.shared_adapters}
        learned = {name: weight for name, weight in own.items() if weight is not None}
        factors = self.trained_factors()
        first = "frozen" if factors is None else "trained"
        made = column_parallel_products(
            hidden_states,
            self._rows_if_any() if factors is None else factors,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            weights=[*learned.values()],
            tile=self.tile,
            factors_train=factors is not None,
        )
        names = [first, *learned] if len(made) > len(learned) else [*learned]
        return dict(zip(names, made, strict=True))

    def _rows_if_any(self) -> torch.Tensor | Factors | None:
        rows = self.frozen()
        return rows if isinstance(rows, Factors) or self.frozen_groups else None

    def _joined(self, role: Role, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join frozen and trainable heads along dimension 2, in the order of their numbers."""
        if role in self.head_orders:
            # Parts without heads too, so that the weights that made them get their empty gradients.
            return torch.cat(parts, dim=2).index_select(2, self.head_orders[role])
        return next((part for part in parts if part.size(2)), parts[-1])

    def _split(
        self, rows: torch.Tensor, heads: Mapping[Role, tuple[int, ...]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split products of query and key rows into heads, `[seq, batch, heads, head_dim]` each."""
        queries = len(heads["query"])
        keys = len(heads["key"])
        rows = rows.unflatten(-1, (queries + keys, self.head_dim))
        if self.shared:  # a key head has the rows of the first query head of its group
            return rows, rows[:, :, :: self.queries_per_group]
        query, key = rows.split((queries, keys), dim=2)
        return query, key
