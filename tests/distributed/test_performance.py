"""performance.*: every way of computing a step gives the same losses and gradients."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

WORKER = "tests.distributed.performance_worker"
LAYOUTS = [(1, False), (2, False), (2, True), (4, True)]  # tensor parallel, sequence parallel


def overrides(**changes: object) -> list[str]:
    defaults = {"model__init_std": 0.2, "data__global_batch_size": 2}
    return tiny_overrides(Path("none"), Path("none"), "performance", **defaults | changes)


def layout(tensor_parallel: int, sequence_parallel: bool) -> dict[str, object]:
    return {
        "parallel__tensor_model_parallel_size": tensor_parallel,
        "parallel__sequence_parallel": str(sequence_parallel).lower(),
    }


def ways(key: str, one: str, other: str) -> dict[str, list[str]]:
    return {"one": [f"performance.{key}={one}"], "other": [f"performance.{key}={other}"]}


def compare(tensor_parallel: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks(tensor_parallel, f"{WORKER}:compare", {"cases": cases})


@pytest.mark.parametrize(("tensor_parallel", "sequence_parallel"), LAYOUTS)
def test_cross_entropy_is_megatrons_without_its_fp32_logits(
    tensor_parallel: int, sequence_parallel: bool
) -> None:
    kinds = list(itertools.product(("in_place", "chunked"), ("true", "false"), ("true", "false")))
    cases = [
        {
            "overrides": overrides(
                **layout(tensor_parallel, sequence_parallel),
                model__tied_embeddings=tied,
                data__reset_at_document_end=alone,
            ),
            "ways": ways("cross_entropy", "megatron", way),
        }
        for way, tied, alone in kinds
    ]
    for kind, report in zip(kinds, compare(tensor_parallel, cases), strict=True):
        assert report["compared"] > 15
        assert report["loss"] < 1e-6 and report["gradients"] < 1e-6, (kind, report)


def test_cross_entropy_keeps_less_for_backward() -> None:
    cases = [
        {
            "overrides": overrides(precision__dtype="bf16", model__vocab_size=8192, model__num_layers=1),
            "ways": ways("cross_entropy", "megatron", way),
        }
        for way in ("in_place", "chunked")
    ]
    tokens, vocabulary = 2 * 32, 8192
    for way, report in zip(("in_place", "chunked"), compare(1, cases), strict=True):
        assert report["loss"] < 1e-5 and report["gradients"] < 2e-2, (way, report)
        spared = report["saved"]["one"] - report["saved"]["other"]
        # fp32 probabilities take four bytes a logit, bf16 ones two.
        assert spared / (tokens * vocabulary) == pytest.approx({"in_place": 2, "chunked": 4}[way], rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cross_entropy_under_zero(stage: int) -> None:
    runs = [
        overrides(
            deepspeed__config=f"zero{stage}",
            data__global_batch_size=4,
            model__tied_embeddings=tied,
            performance__cross_entropy=way,
        )
        for tied in ("true", "false")
        for way in ("megatron", "in_place", "chunked")
    ]
    found = run_ranks(2, f"{WORKER}:engine_losses", {"runs": runs})
    for reference, *others in (found[:3], found[3:]):
        assert len(reference) == 6 and reference[-2] != reference[0]
        for other in others:
            assert other == pytest.approx(reference, rel=1e-5)
