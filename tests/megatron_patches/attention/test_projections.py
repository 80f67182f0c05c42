"""The frozen projection against plain autograd on dense weights, with all that may be added to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.monarch import Factors
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, SEQ, build

BATCH = 3
HALF = {"frozen_heads": (("0%-100%", 0.5),)}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("orthogonal", 4, {}),
    ("orthogonal", 2, {}),
    ("gaussian", 2, {}),
    ("monarch", 4, {}),
    ("monarch", 2, {}),
    ("monarch", 2, HALF),
    ("hybrid", 4, HALF),
    ("hybrid", 2, HALF),
    ("orthogonal_shared", 4, {}),
    ("orthogonal_shared", 2, {}),
    ("orthogonal_shared", 2, HALF),
    ("monarch", 2, {"shared": True}),
    ("vanilla", 2, {"shared": True}),
    ("orthogonal", 2, {"frozen_roles": "query"}),
    ("monarch", 2, {"frozen_roles": "key"}),
    ("monarch_trainable", 2, {}),
    ("monarch_trainable", 2, {"shared": True}),
]


def projection(variant: str, groups: int, axes: dict[str, Any]) -> FrozenQueryKeyValueLinear:
    linear = build(variant, groups, torch.float64, **axes).decoder.layers[1].self_attention.linear_qkv
    assert isinstance(linear, FrozenQueryKeyValueLinear)
    return linear


def trained(linear: FrozenQueryKeyValueLinear) -> list[torch.Tensor]:
    """Copies of the parameters that make rows of queries and keys."""
    names = ("trained_query_key", "trained_right_query_key", "trained_left_query_key")
    live = [getattr(linear, name) for name in names]
    return [weight.detach().clone().requires_grad_() for weight in live if weight is not None]


def dense(linear: FrozenQueryKeyValueLinear, copies: list[torch.Tensor]) -> list[torch.Tensor]:
    """W_Q and W_K `[heads, head_dim, hidden]`, their frozen and trained rows put where their heads are."""
    rows = copies[0] if len(copies) == 1 else torch.empty(0, HIDDEN, dtype=torch.float64)
    if len(copies) == 2:
        rows = Factors(copies[0].transpose(0, 1), copies[1]).rows()
    weights, used = [], 0
    for role, numbers, frozen in linear.frozen_shards():
        theirs = linear.heads.trainable[role]
        own = rows[used : used + len(theirs) * HEAD_DIM]
        used += len(own)
        both = torch.cat((frozen, own)).view(-1, HEAD_DIM, HIDDEN)
        weights.append(both[sorted(range(len(both)), key=(*numbers, *theirs).__getitem__)])
    assert used == len(rows)
    if linear.shared:
        weights[1] = weights[0][:: linear.queries_per_group]
    return weights


@pytest.mark.parametrize(("variant", "groups", "axes"), CASES)
def test_projections_and_gradients_equal_plain_autograd(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any]
) -> None:
    linear = projection(variant, groups, axes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    ours = linear(x)
    copies, value = trained(linear), linear.value_weight.detach().clone().requires_grad_()
    copy = x.detach().clone().requires_grad_()
    weights = [*dense(linear, copies), value.view(groups, HEAD_DIM, HIDDEN)]
    plain = [torch.einsum("sbx,hdx->sbhd", copy, weight) for weight in weights]
    gradients = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in plain]
    torch.autograd.backward(ours, gradients)
    torch.autograd.backward(plain, gradients)
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
    live = [x, linear.value_weight, *(p for name, p in linear.named_parameters() if "query_key" in name)]
    for mine, expected in zip(live, [copy, value, *copies], strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-12, atol=1e-12)


FROZEN_CASES = [case for case in CASES if case[0] not in ("vanilla", "monarch_trainable")]


@pytest.mark.parametrize(("variant", "groups", "axes"), FROZEN_CASES)
def test_frozen_rows_are_regenerated_and_neither_parameters_nor_saved(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any]
) -> None:
    linear = projection(variant, groups, axes)
    for made, held in zip(linear.regenerate(), linear.frozen_tensors(), strict=True):
        assert torch.equal(made, held) and not held.requires_grad
    partly = bool(axes.keys() & {"frozen_heads", "frozen_roles"})
    names = {"value_weight"} | ({"trained_query_key"} if partly else set())
    assert {name for name, _ in linear.named_parameters()} == names == set(linear.state_dict())
    frozen = {role: len(numbers) for role, numbers, _ in linear.frozen_shards()}
    share = 0.5 if "frozen_heads" in axes else 1.0
    held = {"query": HEADS * share, "key": 0 if linear.shared else groups * share}
    only = axes.get("frozen_roles")
    assert frozen == {role: count if only in (None, role) else 0 for role, count in held.items()}
