"""The patched attention against plain autograd in float64.

Its collectives against the stock layer's, and its initial values.
"""

import itertools
from typing import Any

import pytest

from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN
from tests.ranks import run_ranks

CASES = [
    {"variant": variant, "groups": groups, "sequence_parallel": sequence_parallel}
    for variant, groups, sequence_parallel in itertools.product(
        ("vanilla", "orthogonal", "gaussian", "monarch"), (4, 2), (False, True)
    )
]


Reports = tuple[int, dict[tuple[str, int, bool], dict[str, Any]]]
"""Tensor-parallel size, and what was found of each (variant, groups, sequence parallel)."""


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def reports(request: pytest.FixtureRequest) -> Reports:
    cases = [case for case in CASES if request.param > 1 or not case["sequence_parallel"]]
    answers = run_ranks(
        request.param, "tests.distributed.workers.attention:attention_cases", {"cases": cases}
    )
    by_case = {
        (c["variant"], c["groups"], c["sequence_parallel"]): a
        for c, a in zip(cases, answers, strict=True)
    }
    return request.param, by_case


def test_output_and_gradients_equal_plain_autograd(reports: Reports) -> None:
    for case, report in reports[1].items():
        value = report["errors"].pop("value")
        assert value < 1e-12 and max(report["errors"].values()) < 1e-13, case


def test_collectives_are_exactly_those_of_the_stock_layer(reports: Reports) -> None:
    tensor_parallel_size, by_case = reports
    for (variant, groups, sequence_parallel), report in by_case.items():
        stock = by_case["vanilla", groups, sequence_parallel]
        for direction in ("collectives_forward", "collectives_backward"):
            assert report[direction] == stock[direction], (
                variant,
                groups,
                sequence_parallel,
                direction,
            )
        if tensor_parallel_size == 1:
            assert not report["collectives_forward"] and not report["collectives_backward"]
        elif sequence_parallel:
            # forward: gather x, scatter the output; backward: gather the output's gradient,
            # re-gather x, scatter x's gradient
            assert report["collectives_forward"] == {
                "_allgather_base_": 1,
                "_reduce_scatter_base_": 1,
            }
            assert report["collectives_backward"] == {
                "_allgather_base_": 2,
                "_reduce_scatter_base_": 1,
            }
        else:
            assert report["collectives_forward"] == {"allreduce_": 1}
            assert report["collectives_backward"] == {"allreduce_": 1}


def test_frozen_attention_has_no_query_key_weight_gradient_product(reports: Reports) -> None:
    tensor_parallel_size, by_case = reports
    for (variant, groups, sequence_parallel), report in by_case.items():
        shapes = [tuple(shape) for shape in report["gemm_shapes_backward"]]
        value_rows = groups * HEAD_DIM // tensor_parallel_size
        query_key_rows = (HEADS + groups) * HEAD_DIM // tensor_parallel_size
        fused_weight_gradient = (query_key_rows + value_rows, HIDDEN)
        if variant == "vanilla":
            assert fused_weight_gradient in shapes, (groups, sequence_parallel)
        else:
            assert (value_rows, HIDDEN) in shapes
            assert fused_weight_gradient not in shapes and (query_key_rows, HIDDEN) not in shapes


def test_frozen_weights_are_neither_parameters_nor_saved(reports: Reports) -> None:
    for (variant, groups, sequence_parallel), report in reports[1].items():
        weight = "linear_qkv.weight" if variant == "vanilla" else "linear_qkv.value_weight"
        expected = ["linear_proj.weight", weight]
        case = variant, groups, sequence_parallel
        assert report["trainable"] == report["saved"] == expected, case


def test_initial_values_do_not_depend_on_the_layout() -> None:
    """Nor on the variant, which is in test_sweep.py."""
    variants = ["vanilla", "orthogonal", "orthogonal_trainable", "gaussian"]
    payload = {"variants": variants, "groups": 4}
    by_size = {
        n: run_ranks(n, "tests.distributed.workers.attention:weight_digests", payload)
        for n in (1, 2, 4)
    }
    assert by_size[1] == by_size[2] == by_size[4]
    modules = {name.split(".")[-2] for name in by_size[1]["orthogonal"]}
    assert modules >= {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
