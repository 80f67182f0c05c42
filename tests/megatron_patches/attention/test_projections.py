"""The frozen projection against plain autograd on dense weights, with all that may be added to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.orthonormal import ROLES
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, SEQ, build

BATCH = 3
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("orthogonal", 4, {}),
    ("orthogonal", 2, {}),
    ("gaussian", 2, {}),
    ("monarch", 4, {}),
    ("monarch", 2, {}),
    ("monarch", 2, {"frozen_heads": (("0%-100%", 0.5),)}),
    ("hybrid", 4, {"frozen_heads": (("0%-100%", 0.5),)}),
    ("hybrid", 2, {"frozen_heads": (("0%-100%", 0.5),)}),
]


def projection(variant: str, groups: int, axes: dict[str, Any]) -> FrozenQueryKeyValueLinear:
    linear = build(variant, groups, torch.float64, **axes).decoder.layers[1].self_attention.linear_qkv
    assert isinstance(linear, FrozenQueryKeyValueLinear)
    return linear


def dense(linear: FrozenQueryKeyValueLinear) -> list[torch.Tensor]:
    """W_Q and W_K `[heads, head_dim, hidden]`, their frozen and trained rows put where their heads are."""
    trained = linear.trained_query_key
    weights, used = [], 0
    for role, numbers, rows in linear.frozen_shards():
        theirs = linear.heads.trainable[role]
        weight = torch.empty(len(numbers) + len(theirs), HEAD_DIM, HIDDEN, dtype=torch.float64)
        weight[list(numbers)] = rows.view(-1, HEAD_DIM, HIDDEN)
        if trained is not None:
            own = trained.detach()[used : used + len(theirs) * HEAD_DIM]
            weight[list(theirs)] = own.view(-1, HEAD_DIM, HIDDEN)
            used += len(theirs) * HEAD_DIM
        weights.append(weight.requires_grad_())
    return weights


@pytest.mark.parametrize(("variant", "groups", "axes"), CASES)
def test_projections_and_gradients_equal_plain_autograd(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any]
) -> None:
    linear = projection(variant, groups, axes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    ours = linear(x)
    weights = [*dense(linear), linear.value_weight.detach().view(groups, HEAD_DIM, HIDDEN).requires_grad_()]
    copy = x.detach().clone().requires_grad_()
    plain = [torch.einsum("sbx,hdx->sbhd", copy, weight) for weight in weights]
    gradients = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in plain]
    torch.autograd.backward(ours, gradients)
    torch.autograd.backward(plain, gradients)
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        linear.value_weight.grad, weights[2].grad.flatten(0, 1), rtol=1e-12, atol=1e-12
    )
    if linear.trained_query_key is not None:
        rows = [
            weight.grad[list(linear.heads.trainable[role])].flatten(0, 1)
            for role, weight in zip(ROLES, weights, strict=False)
        ]
        torch.testing.assert_close(linear.trained_query_key.grad, torch.cat(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("variant", "groups", "axes"), CASES)
def test_frozen_rows_are_regenerated_and_neither_parameters_nor_saved(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any]
) -> None:
    linear = projection(variant, groups, axes)
    for made, held in zip(linear.regenerate(), linear.frozen_tensors(), strict=True):
        assert torch.equal(made, held) and not held.requires_grad
    names = {"value_weight"} | ({"trained_query_key"} if axes else set())
    assert {name for name, _ in linear.named_parameters()} == names == set(linear.state_dict())
    frozen = {role: numbers for role, numbers, _ in linear.frozen_shards()}
    share = 0.5 if axes else 1.0
    assert [len(frozen[role]) for role in ROLES] == [HEADS * share, groups * share]
