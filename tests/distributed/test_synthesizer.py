"""Synthesizer attention against plain autograd in float64, its collectives and dropout.

On one rank, and on two of tensor and sequence parallelism.
"""

import itertools
from typing import Any

import pytest

from tests.distributed.one_layer import BATCH
from tests.distributed.synthesizer_reference import LENGTH, RANK
from tests.megatron_patches.models import HEAD_DIM, HEADS
from tests.ranks import run_ranks

VARIANTS = ("synthesizer_random", "synthesizer_factorized")
MATRICES = {
    "synthesizer_random": ["scores"],
    "synthesizer_factorized": ["key_factor", "query_factor"],
}
CASES = [
    {
        "variant": variant,
        "groups": groups,
        "length": length,
        "masked": masked,
        "trainable": trainable,
    }
    for variant, groups, (length, masked, trainable) in itertools.product(
        VARIANTS,
        (4, 2),
        (
            (LENGTH, False, True),
            (LENGTH, True, True),
            (LENGTH - 4, False, True),
            (LENGTH, False, False),
        ),
    )
]


@pytest.fixture(scope="module")
def facts() -> dict[int, dict[str, Any]]:
    """{ranks: what they answered}"""
    answers = {}
    for ranks in (1, 2):
        answers[ranks] = run_ranks(
            ranks,
            "tests.distributed.workers.synthesizer:everything",
            {"cases": CASES, "variants": VARIANTS},
        )
        answers[ranks]["cases"] = list(zip(CASES, answers[ranks]["cases"], strict=True))
    return answers


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2-sp"])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


def test_output_and_gradients_equal_plain_autograd(
    facts: dict[int, dict[str, Any]], ranks: int
) -> None:
    for case, report in facts[ranks]["cases"]:
        assert set(report["errors"]) >= {"output", "input", "value"}
        assert ("scores" in report["errors"]) == (
            case["variant"] == VARIANTS[0] and case["trainable"]
        )
        assert max(report["errors"].values()) < 1e-13, case


def test_collectives_are_those_of_the_stock_layer(
    facts: dict[int, dict[str, Any]], ranks: int
) -> None:
    forward, backward = {}, {}
    if ranks > 1:
        forward = {"_allgather_base_": 1, "_reduce_scatter_base_": 1}
        backward = {"_allgather_base_": 2, "_reduce_scatter_base_": 1}
    for case, report in facts[ranks]["cases"]:
        assert report["collectives_forward"] == forward, case
        assert report["collectives_backward"] == backward, case


def test_one_product_applies_the_scores_to_the_whole_batch(
    facts: dict[int, dict[str, Any]], ranks: int
) -> None:
    """Without a mask nothing is made per sample.

    [heads · seq, seq] × [seq, batch · head_dim] per group.
    """
    for case, report in facts[ranks]["cases"]:
        shapes = [tuple(shape) for shape in report["gemm_shapes_forward"]]
        groups, length = case["groups"] // ranks, case["length"]
        rows = HEADS // case["groups"] * length
        per_batch, per_sample = (groups, rows, BATCH * HEAD_DIM), (BATCH * groups, rows, HEAD_DIM)
        assert shapes.count(per_batch) == (0 if case["masked"] else 1), (case, shapes)
        assert shapes.count(per_sample) == (1 if case["masked"] else 0), (case, shapes)
        making_scores = 1 if case["variant"] == "synthesizer_factorized" else 0
        # V, the mixing, the output projection.
        assert len(shapes) == 3 + making_scores, (case, shapes)


def test_scores_start_with_the_scale_of_orthonormal_ones(facts: dict[int, dict[str, Any]]) -> None:
    for case, report in facts[1]["cases"]:
        assert report["logit_sd"] == pytest.approx(1.0, abs=0.1), case


def test_weights_do_not_depend_on_the_layout_and_are_shared_with_vanilla(
    facts: dict[int, dict[str, Any]],
) -> None:
    weights = facts[1]["weights"]
    assert weights == facts[2]["weights"]
    vanilla = weights.pop("vanilla")
    attention = "decoder.layers.0.self_attention"
    for case, ours in weights.items():
        value = ours.pop(f"{attention}.linear_v.weight")
        assert value == vanilla[f"{attention}.linear_qkv.value_weight"]
        scores = {name for name in ours if "core_attention" in name or name.startswith("frozen")}
        variant, trainable = case.split(" trainable=")
        assert len(scores) == len(MATRICES[variant]) * (1 if trainable == "True" else HEADS)
        assert {name: ours[name] for name in ours.keys() - scores} == {
            name: value for name, value in vanilla.items() if ".linear_qkv." not in name
        }


def test_dropout_is_drawn_for_each_head_and_sample_from_seeded_streams(
    facts: dict[int, dict[str, Any]], ranks: int
) -> None:
    for case, report in facts[ranks]["dropout"].items():
        assert report.pop("mean") == pytest.approx(1.0, abs=0.15), case
        assert report.pop("evaluation") < 1e-14, case
        assert set(report.values()) == {True}, (case, report)


def test_executed_flops_are_those_that_torch_counts(facts: dict[int, dict[str, Any]]) -> None:
    """With the full score matrix, as computed; A Bᵀ is made once a micro batch and left out."""
    for case, flops in facts[1]["flops"].items():
        variant, trainable = case.split(" trainable=")
        factors = HEADS * 2 * LENGTH**2 * RANK * (3 if trainable == "True" else 1)
        making = factors if variant == "synthesizer_factorized" else 0
        assert flops["torch"] - making == flops["formula"], case
