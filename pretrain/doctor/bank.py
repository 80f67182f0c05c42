"""What a rank finds out about the frozen bank alone: that it makes the same one as every other rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import head_digests, head_rows_in, split_heads
from megatron_patches.recipe.policy import QKPolicy
from pretrain.config.tree import Config
from pretrain.model.build import DTYPES


def bank_facts(config: Config, seconds: float) -> dict[str, Any]:
    """Digests of the frozen heads, as many as the time allows: head 0 of every layer first, then head 1 ...

    All ranks make them in the same order, so what two ranks have made is a beginning of the same list.
    """
    recipe = config.recipe()
    if not isinstance(recipe, BankRecipe):  # a synthesizer's score matrices training compares itself
        return {"digests": [], "heads": 0}
    deadline, digests = time.monotonic() + seconds, []
    units = frozen_units(recipe, config.policy(), config.model.num_layers)
    for layer, role, heads in units:
        rows = head_rows_in(recipe, layer, role, heads, DTYPES[config.precision.dtype])
        made = head_digests(rows, recipe.head_dim)
        digests += [
            [f"layer {layer} {role} head {head}", sha256[:16]]
            for head, sha256 in zip(heads, made, strict=True)
        ]
        if time.monotonic() > deadline:
            break
    return {"digests": digests, "heads": sum(len(heads) for _, _, heads in units)}


def frozen_units(
    recipe: BankRecipe, policy: QKPolicy, num_layers: int
) -> list[tuple[int, Role, Sequence[int]]]:
    """(layer, role, frozen heads) that are made at once: a head, or with scope `layer` all of a role."""
    units: list[tuple[int, Role, Sequence[int]]] = []
    for layer, groups in enumerate(policy.frozen_groups(num_layers, recipe.num_query_groups)):
        heads = split_heads(recipe.num_attention_heads, recipe.num_query_groups, groups, 0, 1).frozen
        for role in ROLES:
            if recipe.scope == "layer" and heads[role]:
                units.append((layer, role, heads[role]))
            else:
                units += [(layer, role, [head]) for head in heads[role]]
    return sorted(units, key=lambda unit: unit[2][0])
