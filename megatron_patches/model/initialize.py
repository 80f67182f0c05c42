"""Initial values of every trainable weight, the same for any tensor-parallel size and any variant.

megatron-core draws weights from a global generator in module order, so a variant with one parameter
fewer would give other initial values to all other weights. Here each *row* of each full weight
matrix has a random stream of its own, keyed by (seed, name of the weight, row): a rank draws just
the rows it owns, and V of a frozen variant equals V of vanilla.

Which weights there are, what they start from and what DeepSpeed must know of them is declared in
the inventory (`megatron_patches.recipe.tensors`); this is a loop over it.

Version-sensitive: asks megatron-core's GPTModel for its tensor-parallel group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from megatron.core.models.gpt import GPTModel

from megatron_patches.attention.adapters import fill_evenly
from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import head_rows_in, rank_factors
from megatron_patches.engine.compat import mark_tensor_parallel
from megatron_patches.engine.random_streams import normal_rows
from megatron_patches.recipe.parts import Tensor, groups_of_rank

DRAWN = ("normal", "bank")
"""Starts of drawn matrices; of a start from the bank, only the values W_V are drawn here."""


def initialize_parameters(
    model: GPTModel,
    inventory: Sequence[Tensor],
    seed: int,
    init_std: float,
    recipe: BankRecipe | None,
    given: GivenWeights | None = None,
    *,
    fan_in: bool = False,
) -> None:
    """Fill every parameter of `model` in place, and mark it for DeepSpeed and `freeze`.

    Args:
        model: megatron-core's model, with layers of `install`.
        inventory: the declaration of every parameter of the model.
        init_std: standard deviation of the matrices that start `normal`.
        recipe: recipe of the bank from which trainable query and key rows start; None: they start
            like every other matrix.
        given: file whose weights replace the drawn ones; it must have every norm.
        fan_in: matrices start with variance 1 / columns; those added to the residual stream, as
            zeros.

    Raises:
        MethodError: the file is damaged, or lacks a norm.
    """
    init = _Initializer(model, seed, std=init_std, recipe=recipe, given=given, fan_in=fan_in)
    declared = {tensor.name: tensor for tensor in inventory}
    for name, weight in model.named_parameters():
        tensor = declared[name]
        mark(weight, tensor, model.config.sequence_parallel)
        if tensor.start != "own":
            init.fill(weight, tensor)


def mark(weight: torch.nn.Parameter, tensor: Tensor, sequence_parallel: bool) -> None:
    """Mark a parameter with what its declaration says; `freeze` and DeepSpeed read the marks.

    Args:
        sequence_parallel: activations outside the products are slices of the sequence.
    """
    marks = {
        "no_weight_decay": not tensor.decay,
        "optimizer_group": tensor.span,
        "partial_gradient": tensor.partial == "heads"
        or (tensor.partial == "sequence" and sequence_parallel),
    }
    for name, value in marks.items():
        setattr(weight, name, value)
    if tensor.cut is not None:
        mark_tensor_parallel(weight, dim=tensor.cut)


@dataclass
class _Initializer:
    """Initial values of this rank's part of each weight."""

    model: GPTModel
    seed: int
    std: float
    recipe: BankRecipe | None
    given: GivenWeights | None
    fan_in: bool

    def __post_init__(self) -> None:
        config = self.model.config
        # Radford et al. 2019: 2 L matrices add to the residual stream, whose variance they share.
        self.residual_std = self.std / math.sqrt(2 * config.num_layers)
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.rank = self.model.pg_collection.tp.rank()
        self.size = self.model.pg_collection.tp.size()
        # Two tensors of a layer hold the factors of one draw.
        self._factors_of = cache(self._draw_factors)

    @torch.no_grad()
    def fill(self, weight: torch.nn.Parameter, tensor: Tensor) -> None:
        """Fill a parameter with this rank's part of the tensor."""
        if tensor.start in ("right_factor", "left_factor"):
            assert tensor.layer is not None and tensor.groups is not None
            factors = self._factors_of(tensor.layer, tensor.parts, tensor.groups)
            right = tensor.start == "right_factor"
            weight.copy_(factors.right.transpose(0, 1) if right else factors.left)
            return
        rows = [self._rows(tensor, name, length) for name, length in tensor.parts]
        # All parts of a tensor have one start, so either none is drawn or all are.
        if any(part is None for part in rows):
            start = "zeros" if tensor.start == "residual" else tensor.start
            fill_evenly(weight, start, self.model.config.kv_channels)
            return
        rank_parts = [part for part in rows if part is not None]
        if tensor.repeats is not None:  # a piece of each part at a time
            pieces = tensor.repeats // self.size
            rank_parts = [part.view(pieces, -1, *part.shape[1:]) for part in rank_parts]
            weight.copy_(torch.cat(rank_parts, dim=1).flatten(0, 1))
        else:
            weight.copy_(torch.cat(rank_parts))

    def _rows(self, tensor: Tensor, name: str, length: int) -> torch.Tensor | None:
        """Return this rank's rows of a part, from the bank, from the file or drawn.

        None: all are equal.
        """
        role = name.rpartition(".")[2]
        if tensor.start == "bank" and role in ROLES:
            assert self.recipe is not None and tensor.layer is not None
            heads = self._heads(role, tensor.groups or (True,) * (tensor.repeats or 0))
            return head_rows_in(
                self.recipe, tensor.layer, role=role, heads=heads, dtype=torch.float32
            )
        numbers = tensor.rows(length, self.rank, self.size)
        # A file has all norms: to start one at 1 and 0 for want of its values would go unnoticed.
        if self.given is not None and (tensor.kind == "norm" or self.given.has(name)):
            # Outside of layers, only tables over the vocabulary are cut.
            of_tokens = tensor.layer is None and tensor.cut == 0
            rows = self.given.rows(name, numbers, padded=of_tokens)
        else:
            std = self._std(tensor)
            if std is None:
                return None
            rows = normal_rows(self.seed, name, rows=numbers, columns=tensor.shape[1], std=std)
        # Rows are drawn whole, so that their values do not depend on the number of ranks.
        if tensor.cut == 1:
            columns = rows.size(1) // self.size
            rows = rows[:, self.rank * columns : (self.rank + 1) * columns]
        return rows

    def _std(self, tensor: Tensor) -> float | None:
        """Return the standard deviation of a tensor's initial rows; None: they are not drawn."""
        if tensor.start == "embedding":
            return self.std
        if tensor.start == "residual":
            return None if self.fan_in else self.residual_std
        if tensor.start == "fan_in" or (self.fan_in and tensor.start in DRAWN):
            return 1 / math.sqrt(tensor.shape[1])
        return self.std if tensor.start in DRAWN else None

    def _heads(self, role: Role, groups: Sequence[bool]) -> list[int]:
        """Return the numbers of the rank's heads of a role, of those groups that a tensor has."""
        heads = self.queries_per_group if role == "query" else 1
        rank_groups = groups_of_rank(groups, self.rank, self.size)
        return [group * heads + head for group in rank_groups for head in range(heads)]

    def _draw_factors(
        self, layer: int, parts: Sequence[tuple[str, int]], groups: Sequence[bool]
    ) -> Factors:
        """Draw both factors of the rank's rows, which two tensors hold."""
        assert self.recipe is not None
        roles = [name.rpartition(".")[2] for name, _ in parts]
        heads = {role: self._heads(role, groups) for role in ROLES if role in roles}
        return rank_factors(self.recipe, layer, heads, torch.float32)
