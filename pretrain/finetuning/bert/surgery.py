"""Replacement and freezing of queries and keys of a BERT.

A layer's `query` and `key` of transformers are `nn.Linear(hidden_size, heads * head_dim)`: rows
`[h * head_dim, (h + 1) * head_dim)` of the weight are head h, as in this program's bank, which therefore fits
without any reordering. Whatever is replaced loses its bias: a trained offset means nothing to other rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from megatron_patches.bank.exact import orthonormalize_rows
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import head_digests, layer_shard, orthonormality_errors, role_digest
from pretrain.errors import UserError
from pretrain.finetuning.bert.arms import Arm, Condition, Norm, layers_of


def install(model: BertForSequenceClassification, arm: Arm, seed: int, norm: Norm) -> list[dict[str, Any]]:
    """Replace queries and keys of the arm's layers as its condition says.

    `seed`: of the bank. Returns for each layer and role, as report.json has it: by head the Frobenius norms
    of the rows [head_dim, hidden_size], before and after, and the largest |W Wᵀ − I| of the rows, taken by
    their norm to rows of length 1; and the digest that `python -m megatron_patches digest` makes of them.
    Raises UserError: rows of a pretrained head are too close to dependent to be made orthonormal;
    MethodError: no such layers.
    """
    if arm.condition is Condition.unfrozen:
        return []
    replaced = []
    for layer in layers_of(arm.layers, model.config.num_hidden_layers):
        for role in ROLES:
            linear: torch.nn.Linear = getattr(model.bert.encoder.layer[layer].attention.self, role)
            replaced.append(_install(linear, model.config, arm.condition, layer, role, seed, norm))
    return replaced


@torch.no_grad()
def _install(
    linear: torch.nn.Linear,
    config: BertConfig,
    condition: Condition,
    layer: int,
    role: Role,
    seed: int,
    norm: Norm,
) -> dict[str, Any]:
    heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    before = _norms(linear.weight, heads)
    if condition is not Condition.frozen:
        if condition is Condition.reorthonormalized:
            rows = _orthonormal_heads(linear.weight, head_dim, f"layer {layer}, {role}")
        else:
            rows = layer_shard(bank_recipe(config, condition, seed), layer, role, 0, 1, torch.float64)
        if norm is Norm.match:
            rows = rows * (before / _norms(rows, heads)).repeat_interleave(head_dim)[:, None]
        linear.weight.copy_(rows)
        linear.bias.zero_()
    after = _norms(linear.weight, heads)
    unit = linear.weight.double() * (head_dim**0.5 / after).repeat_interleave(head_dim)[:, None]
    return {
        "layer": layer,
        "role": role,
        "norms_before": before.tolist(),
        "norms": after.tolist(),
        "errors": orthonormality_errors(unit, head_dim),
        "digest": role_digest(head_digests(linear.weight, head_dim)),
    }


def _orthonormal_heads(weight: torch.Tensor, head_dim: int, place: str) -> torch.Tensor:
    """Return each head's own rows made orthonormal: float64 [heads * head_dim, hidden_size]"""
    heads = []
    for head, rows in enumerate(weight.double().split(head_dim)):
        orthonormal = orthonormalize_rows(rows.numpy())
        if orthonormal is None:
            raise UserError(
                f"{place} head {head} of the model has rows too close to dependent to be made "
                "orthonormal; leave 'reorthonormalized' out of --conditions"
            )
        heads.append(torch.from_numpy(orthonormal))
    return torch.cat(heads)


def bank_recipe(config: BertConfig, condition: Condition, seed: int) -> BankRecipe:
    """Return the recipe of a BERT's bank: that of a GPT of these sizes with this seed."""
    heads = config.num_attention_heads
    orthonormal = BankRecipe(
        seed=seed,
        hidden_size=config.hidden_size,
        head_dim=config.hidden_size // heads,
        num_attention_heads=heads,
        num_query_groups=heads,
    )
    return replace(orthonormal, init=condition.value) if condition is Condition.gaussian else orthonormal


def frozen_rows(arm: Arm, config: BertConfig) -> dict[str, list[list[int]]]:
    """Return the rows that the arm freezes, {name of the weight: [[first, end]]}."""
    if arm.condition is Condition.unfrozen:
        return {}
    return {
        f"bert.encoder.layer.{layer}.attention.self.{role}.weight": [[0, config.hidden_size]]
        for layer in layers_of(arm.layers, config.num_hidden_layers)
        for role in ROLES
    }


def _norms(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the Frobenius norm of each head's rows: float64 [heads]"""
    return weight.detach().double().reshape(heads, -1).norm(dim=1)
