"""Rows of the frozen bank, drawn or read from a file, as its recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_patches.bank.exact import FloatArray
from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.orthonormal import BankRecipe, Role, check_place, rows_of_heads


def bank_rows(recipe: BankRecipe, layer: int, role: Role, heads: Sequence[int]) -> FloatArray:
    """W of several heads of one role: float64 `[len(heads) * head_dim, hidden_size]`.

    Raises:
        MethodError: no such layer, role or head; a file that cannot be read, or has another digest.
    """
    if recipe.given_path is None:
        return rows_of_heads(recipe, layer, role, heads)
    check_place(recipe, layer, role, heads)
    given = GivenWeights(Path(recipe.given_path))
    rows = [given.head(layer, role, head, recipe.head_dim).double().numpy() for head in heads]
    return np.concatenate(rows) if rows else np.empty((0, recipe.hidden_size))
