"""Gradients reduced during the backward pass.

The same bits as after it, each once, and really during it.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

SHARDED = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": "true"}
ENGINES: dict[str, dict[str, object]] = {
    "fp32 stage 0": {"deepspeed__config": "zero0"},
    "bf16 stage 1": {"precision__dtype": "bf16"},
}


@pytest.fixture(scope="module")
def reports(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two data-parallel ranks of two tensor-parallel ones, two micro batches a step."""
    runs = tmp_path_factory.mktemp("reduction")
    planned = {
        f"{name}, {overlap}": tiny_overrides(
            tiny_shards,
            runs,
            f"{number}-{overlap}",
            **SHARDED,
            performance__overlap_reduction=overlap,
            **engine,
        )
        for number, (name, engine) in enumerate(ENGINES.items())
        for overlap in ("true", "false")
    }
    return run_ranks(4, "tests.distributed.workers.reduction:steps", {"runs": planned})


@pytest.mark.parametrize("engine", ENGINES)
def test_overlapped_or_not_the_training_is_the_same_bit_for_bit(
    engine: str, reports: dict[str, Any]
) -> None:
    overlapped, after = (reports[f"{engine}, {overlap}"] for overlap in ("true", "false"))
    for quantity in ("losses", "norms", "weights"):
        assert overlapped[quantity] == after[quantity], quantity
    first, other, *replicas = overlapped["weights"]
    # Each tensor-parallel rank's part, on both replicas.
    assert replicas == [first, other] and first != other
    assert overlapped["losses"][-1] < overlapped["losses"][0]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_gradient_is_reduced_once_a_step_most_before_the_last_is_made(
    engine: str, reports: dict[str, Any]
) -> None:
    overlapped, after = (reports[f"{engine}, {overlap}"] for overlap in ("true", "false"))
    assert after["collectives"] == 0
    assert overlapped["elements"] == overlapped["trainable"]
    assert overlapped["before_last_gradient"] > overlapped["collectives"] / 2
    assert overlapped["gradients_left"] == []
