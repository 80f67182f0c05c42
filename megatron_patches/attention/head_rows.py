"""Rows and adapters of one rank's query and key heads, without the products.

`projections` multiplies hidden states by them in a layer of megatron-core, `module` in a plain
torch module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from megatron_patches.attention.adapters import HeadAdapters, Heads
from megatron_patches.attention.convolution import Reach
from megatron_patches.bank.factors import block_sizes
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import query_key_rows
from megatron_patches.engine.freeze import FROZEN_BUFFERS
from megatron_patches.recipe.policy import QKPolicy

LEARNED_ROWS = ("trained_query_key", "trained_right_query_key", "trained_left_query_key")
"""Names of the tensors of learned rows: the rows, or the two factors in their place."""


class Rows(Enum):
    """State of query and key rows; a layer's learned rows are all TRAINED or all KEPT."""

    DRAWN = "non-persistent buffers, regenerated from the recipe"
    TRAINED = "parameters"
    KEPT = "non-persistent buffers, frozen as they were trained"


class HeadRows(torch.nn.Module):
    """Frozen rows, trained rows and adapters of one rank's queries and keys in a layer.

    `tensors` returns those that exist of the first six attributes; the others are None.

    Attributes:
        query_key_weight: drawn rows `[frozen heads of both roles * head_dim, hidden]` in the
            compute dtype. A buffer, not a parameter, because DeepSpeed partitions, gathers,
            broadcasts and saves parameters, frozen or not.
        query_key_right: right factor `[a, m, b]` of a structured bank's drawn rows.
        query_key_left: left factor `[m, a, a]`.
        trained_query_key: learned rows `[trainable heads of both roles * head_dim, hidden]`.
        trained_right_query_key: right factor `[m, a, b]` of learned rows of all heads.
        trained_left_query_key: left factor `[m, a, a]`.
        learned: state of the learned rows. KEPT rows are NaN until a checkpoint or the engine of
            the previous phase gives them values.
        shared_adapters: {parameter: adapter} of the parameters `[rows, hidden]` of adapters that
            heads share, such as low_rank_down.
        adapters: the other parameters of the adapters, or None.
        head_orders: role -> positions of (frozen, then trainable) heads that restore the heads'
            order, of the roles of which a layer freezes some heads and trains others.
    """

    query_key_weight: torch.Tensor | None
    query_key_right: torch.Tensor | None
    query_key_left: torch.Tensor | None
    trained_query_key: torch.Tensor | None
    trained_right_query_key: torch.Tensor | None
    trained_left_query_key: torch.Tensor | None
    learned: Rows

    def _add_frozen_rows(
        self,
        policy: QKPolicy,
        recipe: BankRecipe | None,
        frozen_groups: tuple[int, ...],
        *,
        layer: int,
        heads: tuple[int, int],
        sizes: tuple[int, int],
        tp_rank: tuple[int, int] = (0, 1),
        dtype: torch.dtype,
        device: Any,
        learned: Rows = Rows.TRAINED,
    ) -> None:
        """Add the frozen rows of this rank's heads, the first step of a constructor.

        Args:
            recipe: recipe of the rows; None: there are none.
            frozen_groups: global numbers of the frozen key heads; their query heads are frozen with
                them.
            layer: number of the layer, from 0.
            heads: query heads and key heads of all ranks.
            sizes: width of the hidden states, and of a head.
            tp_rank: tensor-parallel rank, and the number of ranks.
            learned: state of the rows of the other heads.
        """
        self.policy, self.recipe, self.layer = policy, recipe, layer
        self.learned = learned
        self.frozen_groups, self.shared = frozen_groups, policy.shared
        self.input_size, self.head_dim = sizes
        self.queries_per_group = heads[0] // heads[1]
        self.num_groups = heads[1] // tp_rank[1]
        self.adapted = policy.adapted_groups(frozen_groups, heads[1]) if policy.corrections else ()
        self.first_group = tp_rank[0] * self.num_groups
        self.dtype = dtype
        self.heads = split_heads(
            *heads, frozen_groups, *tp_rank, policy.frozen_row_roles, policy.shared
        )
        # Not persistent: a checkpoint never holds what the recipe regenerates.
        for name in FROZEN_BUFFERS:
            self.register_buffer(name, None, persistent=False)
        self._draw(device)

    def _draw(self, device: Any) -> None:
        """Fill the buffers with the rows in `dtype`."""
        for name, values in zip(self._buffer_names(), self.regenerate(), strict=True):
            setattr(self, name, values.to(device))

    def _buffer_names(self) -> tuple[str, ...]:
        """Return the names in FROZEN_BUFFERS that hold this layer's frozen rows."""
        # Without frozen heads a structured bank has no factors, but an empty matrix of rows.
        any_frozen = any(self.heads.frozen[role] for role in ROLES)
        structured = self.recipe is not None and self.recipe.structured
        return FROZEN_BUFFERS[1:] if structured and any_frozen else FROZEN_BUFFERS[:1]

    def regenerate(self) -> tuple[torch.Tensor, ...]:
        """Draw this rank's frozen rows from the recipe once more.

        Returns:
            The tensors of the buffers that `_buffer_names` names, on the CPU in the compute dtype:
            rows `[rows, hidden]`, or the two factors of a structured bank.
        """
        frozen = self.heads.frozen
        if self.recipe is None or not any(frozen.values()):
            return (torch.empty(0, self.input_size, dtype=self.dtype),)
        rows = query_key_rows(self.recipe, self.layer, frozen, self.dtype)
        return rows if isinstance(rows, Factors) else (rows,)

    def frozen(self) -> torch.Tensor | Factors:
        """Return the frozen rows in the form in which inputs are multiplied by them."""
        drawn = [*self.tensors(Rows.DRAWN).values()]
        return Factors(*drawn) if len(drawn) == 2 else drawn[0]

    def frozen_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in memory of this rank's frozen rows, kept ones included."""
        return *self.tensors(Rows.DRAWN).values(), *self.kept_tensors().values()

    def kept_tensors(self) -> dict[str, torch.Tensor]:
        """Return {name: buffer} of the rows, or factors, that are frozen as they were trained."""
        return self.tensors(Rows.KEPT)

    def tensors(self, state: Rows) -> dict[str, torch.Tensor]:
        """Return {name: tensor} of the rows, or factors, in a state; empty if there are none."""
        learned_names = LEARNED_ROWS if state is self.learned else ()
        names = FROZEN_BUFFERS if state is Rows.DRAWN else learned_names
        values = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in values.items() if tensor is not None}

    def trained_shards(self) -> Iterator[tuple[Role, tuple[int, ...], torch.Tensor]]:
        """Yield the rows of this rank that train or have trained, queries, then keys.

        Yields:
            (role, global head numbers, `[heads * rows of a head, columns]`): rows of W, or the
            entries of both factors side by side.
        """
        tensors = [tensor.detach().flatten(1) for tensor in self.tensors(self.learned).values()]
        if not tensors:
            return
        values = torch.cat(tensors, dim=1)
        query, key = (self.heads.trainable[role] for role in ROLES)
        queries = values.size(0) * len(query) // (len(query) + len(key))
        yield "query", query, values[:queries]
        yield "key", key, values[queries:]

    def frozen_shards(
        self, exact: bool = False
    ) -> Iterator[tuple[Role, tuple[int, ...], torch.Tensor]]:
        """Yield this rank's frozen rows as they are in memory, queries, then keys.

        Args:
            exact: multiply the factors of a structured bank in float64, where no product is
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
        # The parameter has blocks first, so that a rank's share of it is contiguous.
        return Factors(right.transpose(0, 1), left)

    def _add_trained(self, device: Any) -> None:
        """Add uninitialised learned rows and adapters, the last step of a constructor."""
        self._add_trained_rows(device)
        self._place_heads(device)
        self._add_adapters(device)

    def _parameter(self, shape: tuple[int, ...], device: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(shape, device=device, dtype=self.dtype))

    def _place_heads(self, device: Any) -> None:
        """Record the positions of frozen, learned and adapted heads."""
        heads = self.heads.sharing(self.queries_per_group) if self.shared else self.heads
        mixes_heads = self.frozen_groups and self.trained_query_key is not None
        self.head_orders = {
            role: torch.tensor(heads.order(role), device=device)
            for role in (ROLES if self.shared else self.policy.frozen_row_roles)
            if mixes_heads and heads.trainable[role]
        }
        # Adapted groups by their numbers on this rank, where others may lie on other ranks.
        local_groups = [group - self.first_group for group in self.adapted]
        adapted_groups = [group for group in local_groups if 0 <= group < self.num_groups]
        self.adapts_all = len(adapted_groups) == self.num_groups
        self.adapted_groups = torch.tensor(adapted_groups, dtype=torch.long, device=device)

    def _add_trained_rows(self, device: Any) -> None:
        count = sum(len(self.heads.trainable[role]) for role in ROLES)
        rows = count * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        if rows and self.policy.trains_factors:
            a, b = block_sizes(self.input_size, self.head_dim)
            shapes = {
                "trained_right_query_key": (rows // a, a, b),
                "trained_left_query_key": (rows // a, a, a),
            }
        elif rows and self.policy.has_rows:
            shapes = {"trained_query_key": (rows, self.input_size)}
        for name in LEARNED_ROWS:
            shape = shapes.get(name)
            if shape is None:
                self.register_parameter(name, None)
            elif self.learned is Rows.KEPT:
                # NaN, so that rows which nothing has filled do not pass unnoticed.
                unknown = torch.full(shape, math.nan, device=device, dtype=self.dtype)
                self.register_buffer(name, unknown, persistent=False)
            else:
                self.register_parameter(name, self._parameter(shape, device))

    def _add_adapters(self, device: Any) -> None:
        self.adapters: HeadAdapters | None = None
        self.shared_adapters: dict[str, str] = {}
        self.taps = 0
        self.reach: Reach = None
        if not self.adapted:
            return
        policy = self.policy
        groups = len(self.adapted_groups)
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

    def _assembled(self, products: Mapping[str, torch.Tensor]) -> Heads:
        """Return queries, keys and values, adapters applied.

        Args:
            products: {value, frozen, trained or a parameter of `shared_adapters`: the product with
                the hidden states, `[seq, batch, rows]`}.

        Returns:
            Queries `[seq, batch, heads, head_dim]`, keys and values
            `[seq, batch, groups, head_dim]`.
        """
        value = products["value"].unflatten(-1, (self.num_groups, self.head_dim))
        shared = {name: products[name] for name in self.shared_adapters}
        sources = {"frozen": self.heads.frozen, "trained": self.heads.trainable}
        parts = {
            name: self._split(products[name], heads)
            for name, heads in sources.items()
            if name in products
        }
        # Adapters of some heads act on those only; adapters of all heads act after the join below.
        if self.adapters is not None and not self.adapts_all:
            adapted_value = value.index_select(2, self.adapted_groups)
            corrected = self.adapters(Heads(*parts["frozen"], adapted_value, self.reach), shared)
            parts["frozen"] = corrected.query, corrected.key
            if corrected.value is not adapted_value:
                value = value.index_copy(2, self.adapted_groups, corrected.value)
        # Without rows the adapter low_rank makes queries and keys: it gets empty ones.
        if not parts:
            parts["none"] = (value[:, :, :0],) * 2
        query, key = (
            self._joined(role, [part[n] for part in parts.values()]) for n, role in enumerate(ROLES)
        )
        if self.adapters is not None and self.adapts_all:
            return self.adapters(Heads(query, key, value, self.reach), shared)
        return Heads(query, key, value)

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
