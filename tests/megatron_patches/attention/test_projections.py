"""The frozen projection against autograd on dense weights, with all that may be added to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.orthonormal import ROLES
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.variants import policy_for
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
    linear = (
        build(variant, groups, torch.float64, **axes).decoder.layers[1].self_attention.linear_qkv
    )
    assert isinstance(linear, FrozenQueryKeyValueLinear)
    return linear


def trained(linear: FrozenQueryKeyValueLinear) -> list[torch.Tensor]:
    """Copies of the parameters that make rows of queries and keys."""
    names = ("trained_query_key", "trained_right_query_key", "trained_left_query_key")
    live = [getattr(linear, name) for name in names]
    return [weight.detach().clone().requires_grad_() for weight in live if weight is not None]


def dense(linear: FrozenQueryKeyValueLinear, copies: list[torch.Tensor]) -> list[torch.Tensor]:
    """W_Q and W_K `[heads, head_dim, hidden]`, frozen and trained rows in the heads' order."""
    rows = copies[0] if len(copies) == 1 else torch.empty(0, HIDDEN, dtype=torch.float64)
    if len(copies) == 2:
        rows = Factors(copies[0].transpose(0, 1), copies[1]).rows()
    weights, used = [], 0
    for role, numbers, frozen in linear.frozen_shards():
        theirs = linear.heads.trainable[role]
        head_rows = rows[used : used + len(theirs) * HEAD_DIM]
        used += len(head_rows)
        both = torch.cat((frozen, head_rows)).view(-1, HEAD_DIM, HIDDEN)
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
    copies = trained(linear)
    value = linear.value_weight.detach().clone().requires_grad_()
    copy = x.detach().clone().requires_grad_()
    weights = [*dense(linear, copies), value.view(groups, HEAD_DIM, HIDDEN)]
    plain = [torch.einsum("sbx,hdx->sbhd", copy, weight) for weight in weights]
    gradients = [
        torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in plain
    ]
    torch.autograd.backward(ours, gradients)
    torch.autograd.backward(plain, gradients)
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
    live = [
        x,
        linear.value_weight,
        *(p for name, p in linear.named_parameters() if "query_key" in name),
    ]
    for mine, expected in zip(live, [copy, value, *copies], strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-12, atol=1e-12)


NORMED_CASES = [
    *CASES,
    ("vanilla", 2, {}),
    ("low_rank", 2, {"adapters": ("short_convolution",)}),
    ("hybrid", 2, HALF | {"adapters": ("channel_scale", "query_key_bias")}),
]


@pytest.mark.parametrize(("variant", "groups", "axes"), NORMED_CASES)
def test_queries_and_keys_of_all_heads_are_normalised_last(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any]
) -> None:
    attentions = [
        build(variant, groups, torch.float64, qk_norm=norm, **axes).decoder.layers[1].self_attention
        for norm in (False, True)
    ]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    plain, normed = (attention.get_query_key_value_tensors(x) for attention in attentions)
    gains = [getattr(attentions[1], f"{role}_layernorm").weight for role in "qk"]
    for unnormalised, after, gain in zip(plain[:2], normed[:2], gains, strict=True):
        assert torch.equal(gain, torch.ones_like(gain)) and gain.partial_gradient
        expected = torch.nn.functional.rms_norm(unnormalised, (HEAD_DIM,), gain, 1e-5)
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(plain[2], normed[2])


FROZEN_CASES = [case for case in CASES if case[0] not in ("vanilla", "monarch_trainable")]


@pytest.mark.parametrize(("variant", "groups", "axes"), FROZEN_CASES)
def test_frozen_rows_are_regenerated_and_neither_parameters_nor_saved(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any]
) -> None:
    linear = projection(variant, groups, axes)
    for regenerated, held in zip(linear.regenerate(), linear.frozen_tensors(), strict=True):
        assert torch.equal(regenerated, held) and not held.requires_grad
    partly = bool(axes.keys() & {"frozen_heads", "frozen_roles"})
    names = {"value_weight"} | ({"trained_query_key"} if partly else set())
    assert {name for name, _ in linear.named_parameters()} == names == set(linear.state_dict())
    frozen = {role: len(numbers) for role, numbers, _ in linear.frozen_shards()}
    share = 0.5 if "frozen_heads" in axes else 1.0
    held = {"query": HEADS * share, "key": 0 if linear.shared else groups * share}
    only = axes.get("frozen_roles")
    assert frozen == {role: count if only in (None, role) else 0 for role, count in held.items()}


def test_low_rank_alone_makes_queries_and_keys(one_rank: dist.ProcessGroup) -> None:
    linear = projection("low_rank", 2, {"low_rank": 3})
    x = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64)
    query, key, value = linear(x)
    down, adapters = linear.low_rank_down, linear.adapters
    for projected, up, rows in (
        (query, adapters.up_query, down[:3]),
        (key, adapters.up_key, down[3:]),
    ):
        expected = torch.einsum("sbx,rx,hr->sbh", x, rows, up).unflatten(-1, (-1, HEAD_DIM))
        torch.testing.assert_close(projected, expected, rtol=1e-12, atol=1e-12)
    assert query.shape[2:] == (HEADS, HEAD_DIM) and key.shape[2:] == value.shape[2:] == (
        2,
        HEAD_DIM,
    )


ADAPTERS = ("channel_scale", "query_key_bias", "short_convolution")


def test_adapters_correct_frozen_heads_and_no_others(one_rank: dist.ProcessGroup) -> None:
    plain = projection("hybrid", 2, HALF)
    linear = projection("hybrid", 2, HALF | {"adapters": ADAPTERS})
    linear.load_state_dict(plain.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(4)
    for parameter in linear.adapters.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    uncorrected = plain(x)
    corrected = linear(x)
    frozen = [linear.heads.frozen["query"], linear.heads.frozen["key"], linear.heads.frozen["key"]]
    for was, is_now, frozen_heads in zip(uncorrected, corrected, frozen, strict=True):
        changed = (was != is_now).any((0, 1, 3))
        assert changed.nonzero().flatten().tolist() == [*frozen_heads] and len(
            frozen_heads
        ) < is_now.size(2)
    linear.look_back_within(~torch.eye(SEQ, dtype=torch.bool).expand(BATCH, 1, SEQ, SEQ))
    alone = linear(x)  # every token by itself
    torch.testing.assert_close(alone[2][:1], corrected[2][:1])  # which the first one is anyway
    assert not torch.allclose(alone[2][1:], corrected[2][1:])


@pytest.mark.parametrize(
    ("variant", "axes", "alone"),
    [
        ("monarch", {}, True),
        ("monarch", HALF, False),
        ("monarch", {"adapters": ("channel_scale",)}, False),
        ("orthogonal", {}, False),
        ("monarch", {"shared": True}, True),
    ],
)
def test_queries_and_keys_can_be_made_anew_where_they_come_from_structured_rows_alone(
    one_rank: dist.ProcessGroup, variant: str, axes: dict[str, Any], alone: bool
) -> None:
    linear = projection(variant, 2, axes)
    assert linear.only_structured is alone
    if alone:
        x = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64)
        for projected, anew in zip(linear(x)[:2], linear.queries_and_keys(x), strict=True):
            assert torch.equal(projected, anew)


@pytest.mark.parametrize("variant", ["orthogonal", "monarch", "monarch_trainable"])
def test_sequence_parallelism_on_one_rank_changes_nothing(
    one_rank: dist.ProcessGroup, variant: str
) -> None:
    results = []
    for parallel in (False, True):
        linear = projection(variant, 2, {})
        linear.sequence_parallel = parallel
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(
            SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64
        ).requires_grad_()
        outputs = linear(x)
        sum(output.square().sum() for output in outputs).backward()
        with torch.no_grad():
            unchanged = linear(x)
        gradients = [parameter.grad for parameter in linear.parameters()]
        results.append([*outputs, *unchanged, x.grad, *gradients])
    assert all(torch.equal(ours, other) for ours, other in zip(*results, strict=True))


def test_what_a_rank_owns_is_marked_and_what_all_share_has_partial_gradients(
    one_rank: dist.ProcessGroup,
) -> None:
    """DeepSpeed's norm of the gradients and the optimizer's groups go by these marks."""
    marks = {
        "frozen_heads": (("0%-100%", 0.5),),
        "adapters": ("low_rank", "channel_scale"),
        "low_rank": 3,
    }
    for variant, axes in (("hybrid", marks), ("monarch_trainable", {})):
        for name, parameter in projection(variant, 2, axes).named_parameters():
            shared = name == "low_rank_down"
            assert getattr(parameter, "partial_gradient", False) is shared, name
            assert getattr(parameter, "tensor_model_parallel", False) is not shared, name
            assert shared or parameter.partition_dim == 0, name


@dataclass(frozen=True)
class Place:
    """Tensor-parallel group of which a layer asks rank and size, and which communicates nothing."""

    of: int
    ranks: int

    def rank(self) -> int:
        return self.of

    def size(self) -> int:
        return self.ranks


def of_rank(
    whole: FrozenQueryKeyValueLinear, config: Any, policy: QKPolicy, tp_group: Place
) -> Any:
    """Return that rank's projection, with its part of the weights of the whole one."""
    unused = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
    linear = FrozenQueryKeyValueLinear(
        HIDDEN,
        0,
        config=config,
        init_method=torch.nn.init.zeros_,
        tp_comm_buffer_name="qkv",
        tp_group=tp_group,
        policy=policy,
        recipe=whole.recipe,
        frozen_groups=whole.frozen_groups,
        layer=whole.layer,
        **unused,
    )
    weights = dict(whole.named_parameters())
    for name, parameter in linear.named_parameters():
        values = weights[name].data
        if name.startswith("trained"):
            theirs = [(role, head) for role in ROLES for head in whole.heads.trainable[role]]
            mine = [
                theirs.index((role, head))
                for role in ROLES
                for head in linear.heads.trainable[role]
            ]
            values = values.unflatten(0, (len(theirs), -1))[mine].flatten(0, 1)
        elif name == "value_weight":
            values = values.chunk(tp_group.ranks)[tp_group.of]
        elif name.startswith("adapters"):
            theirs = whole.adapted_groups.tolist()
            first = tp_group.of * linear.num_groups
            mine = [theirs.index(first + group) for group in linear.adapted_groups.tolist()]
            values = values.unflatten(0, (len(theirs), -1))[mine].flatten(0, 1)
        parameter.data.copy_(values)
    return linear


QUARTER = {"frozen_heads": (("0%-100%", 0.25),)}  # one rank of two has no frozen head
MANY: list[tuple[str, dict[str, Any]]] = [
    ("orthogonal", {}),
    ("monarch", {}),
    ("monarch", HALF),
    ("hybrid", HALF),
    ("hybrid", QUARTER),
    ("orthogonal_shared", {}),
    ("orthogonal_shared", HALF),
    ("monarch_trainable", {}),
    ("hybrid", HALF | {"adapters": (*ADAPTERS, "low_rank"), "low_rank": 2}),
    ("hybrid", QUARTER | {"adapters": ADAPTERS}),
    ("orthogonal", {"adapters": (*ADAPTERS, "low_rank"), "low_rank": 2}),
]


@pytest.mark.parametrize(("variant", "axes"), MANY)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_together_project_as_one(
    one_rank: dist.ProcessGroup, variant: str, axes: dict[str, Any], ranks: int
) -> None:
    attention = build(variant, 4, torch.float64, **axes).decoder.layers[1].self_attention
    whole = attention.linear_qkv
    generator = torch.Generator().manual_seed(5)
    for parameter in whole.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        tp_groups = [Place(rank, ranks) for rank in range(ranks)]
        projected = [
            of_rank(whole, attention.config, policy_for(variant, axes), tp_group)(x)
            for tp_group in tp_groups
        ]
        for parts, expected in zip(zip(*projected, strict=True), whole(x), strict=True):
            assert {part.size(2) for part in parts} == {expected.size(2) // ranks}
            torch.testing.assert_close(torch.cat(parts, 2), expected, rtol=1e-12, atol=1e-12)
