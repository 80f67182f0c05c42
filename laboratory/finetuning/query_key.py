"""Query and key projections of a model of transformers: found by name, replaced, frozen.

    query, key           BERT, RoBERTa, ELECTRA        q_proj, k_proj    Llama, Starcoder2, OPT, …
    q_lin, k_lin         DistilBERT                    c_attn            GPT2: [q, k, v]
    Wqkv                 ModernBERT: [q, k, v]         query_key_value   GPT-NeoX: [q k v] by head

Freezing is by row: a weight may hold rows that train, as a fused one does. The gradient of a frozen
row is set to zero, so AdamW without weight decay leaves its bits as they are; `Frozen.check` proves
it. A bias of frozen rows is frozen with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from megatron_patches.bank.orthonormal import BankRecipe, Role, rows_of_heads
from pretrain.errors import UserError

Rows = Mapping[str, Sequence[Sequence[int]]]
"""{name of a weight: [first, end] of its frozen rows, those of W in W x}, as export.json has it."""

_SEPARATE: Mapping[str, Role] = {
    "query": "query",
    "key": "key",
    "q_proj": "query",
    "k_proj": "key",
    "q_lin": "query",
    "k_lin": "key",
}
_FUSED = ("c_attn", "Wqkv")
_INTERLEAVED = "query_key_value"


@dataclass(frozen=True)
class Projection:
    """Rows of queries or of keys in one layer.

    Attributes:
        name: Name of the module.
        layer: Number of the layer, from 0.
        heads: [first, end] of the rows of each head.
    """

    name: str
    module: nn.Module
    layer: int
    role: Role
    heads: tuple[tuple[int, int], ...]


def query_key(model: Any) -> list[Projection]:
    """Return all projections to queries and keys.

    Raises:
        UserError: no module has a name that tells.
    """
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width
    projections: list[Projection] = []
    layers = {"query": 0, "key": 0}
    for name, module in model.named_modules():
        if getattr(getattr(module, "weight", None), "ndim", 0) != 2:
            continue
        last = name.rpartition(".")[2]
        for role, firsts in _head_starts(last, len(rows_of(module)), head_dim).items():
            heads = tuple((first, first + head_dim) for first in firsts)
            projections.append(Projection(name, module, layers[role], role=role, heads=heads))
            layers[role] += 1
    if not projections:
        raise UserError(
            f"{type(model).__name__} has no modules that are known as projections to queries and "
            f"keys ({', '.join([*_SEPARATE, *_FUSED, _INTERLEAVED])}); give a model that has"
        )
    return projections


def _head_starts(name: str, size: int, head_dim: int) -> dict[Role, range]:
    """Return {role: first row of each head} of a module with `size` rows."""
    if name in _SEPARATE:
        return {_SEPARATE[name]: range(0, size, head_dim)}
    third = size // 3
    if name in _FUSED:
        return {"query": range(0, third, head_dim), "key": range(third, 2 * third, head_dim)}
    if name == _INTERLEAVED:
        return {"query": range(0, size, 3 * head_dim), "key": range(head_dim, size, 3 * head_dim)}
    return {}


def rows_of(module: Any) -> torch.Tensor:
    """Return a module's weight as `[outputs, inputs]`, which shares its memory."""
    return _by_output(module, module.weight.detach())


def _by_output(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor of a weight's shape as `[outputs, inputs]`; biases stay."""
    from transformers.pytorch_utils import Conv1D

    return weight.T if isinstance(module, Conv1D) and weight.ndim == 2 else weight


def all_rows(projections: Sequence[Projection]) -> Rows:
    """Return the rows of all heads."""
    rows: dict[str, list[Sequence[int]]] = {}
    for projection in projections:
        rows.setdefault(f"{projection.name}.weight", []).extend(projection.heads)
    return rows


def replace_rows(
    projections: Sequence[Projection], seed: int, scope: Literal["head", "layer"]
) -> None:
    """Replace all rows by those of our frozen bank, and their biases by 0.

    Args:
        seed: Seed of the bank.
        scope: Rows orthonormal within each head, or across all heads of a layer's role.

    Raises:
        MethodError: there are not as many orthonormal rows.
    """
    heads = {projection.role: len(projection.heads) for projection in projections}
    first, end = projections[0].heads[0]
    recipe = BankRecipe(
        seed=seed,
        hidden_size=rows_of(projections[0].module).size(1),
        head_dim=end - first,
        num_attention_heads=heads["query"],
        num_query_groups=heads["key"],
        scope=scope,
    )
    for projection in projections:
        numbers = range(len(projection.heads))
        drawn = torch.from_numpy(rows_of_heads(recipe, projection.layer, projection.role, numbers))
        weight = rows_of(projection.module)
        bias = getattr(projection.module, "bias", None)
        for (first, end), rows in zip(projection.heads, drawn.split(recipe.head_dim), strict=True):
            weight[first:end] = rows
            if bias is not None:
                bias.detach()[first:end] = 0


@dataclass(frozen=True)
class Frozen:
    """Frozen entries: (parameter, mask of its frozen entries, their values) of each parameter."""

    parts: Sequence[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]

    @property
    def entries(self) -> int:
        """Return the number of frozen parameters."""
        return sum(len(values) for _, _, values in self.parts)

    def check(self) -> None:
        """Compare the bits of the frozen entries with those before the training.

        Raises:
            RuntimeError: a bit changed.
        """
        for parameter, mask, values in self.parts:
            if not torch.equal(parameter.detach().cpu()[mask], values):
                raise RuntimeError(
                    "frozen rows of queries and keys changed in fine-tuning: this is a defect"
                )


def freeze(model: nn.Module, rows: Rows) -> Frozen:
    """Freeze rows of weights, and the biases that belong to them.

    Raises:
        UserError: the model has no such weight, or not as many rows.
    """
    parts = []
    for name, ranges in rows.items():
        try:
            module: Any = model.get_submodule(name.removesuffix(".weight"))
        except AttributeError as error:
            raise UserError(f"{name} is to be frozen, but the model has no such weight") from error
        for parameter in (module.weight, getattr(module, "bias", None)):
            if parameter is None:
                continue
            mask = torch.zeros(parameter.shape, dtype=torch.bool)
            frozen = _by_output(module, mask)
            for first, end in ranges:
                if not 0 <= first < end <= len(frozen):
                    raise UserError(
                        f"rows {first} to {end} of {name} are to be frozen, but it has "
                        f"{len(frozen)}"
                    )
                frozen[first:end] = True
            parts.append((parameter, mask, parameter.detach().cpu()[mask]))
            if mask.all():
                parameter.requires_grad_(False)
            else:
                parameter.register_hook(partial(_without, mask))
    return Frozen(parts)


def _without(mask: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.masked_fill(mask.to(gradient.device), 0)
