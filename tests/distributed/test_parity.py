"""What runs of other layouts must not change, beside test_designs.py and test_layouts.py.

Those compare every stage, tensor-parallel and data-parallel size with one rank, pair by pair.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.designs import design_overrides
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

WORKER = "tests.distributed.workers.designs:train_all"


def test_dropout_masks_do_not_depend_on_the_data_parallel_size(
    tiny_shards: Path, tmp_path: Path
) -> None:
    def losses(ranks: int, *rates: float) -> list[list[float]]:
        runs = [
            design_overrides(
                "orthogonal", tiny_shards, tmp_path, f"{rate}-{ranks}", model__dropout=rate
            )
            for rate in rates
        ]
        payload = {"runs": [{"overrides": overrides} for overrides in runs]}
        return [report["loss"] for report in run_ranks(ranks, WORKER, payload)]

    without, alone = losses(1, 0.0, 0.1)
    (parallel,) = losses(2, 0.1)
    assert parallel == pytest.approx(alone, rel=1e-5)
    assert alone != pytest.approx(without, rel=1e-4)  # dropout did something


def test_adapters_of_no_elements_train_like_those_of_one_rank(
    tiny_shards: Path, tmp_path: Path
) -> None:
    """Three of four ranks have no frozen head, and empty adapters.

    DeepSpeed's ZeRO once failed on such parameters (#8279, #8297).
    """

    def overrides(size: int, stage: int) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            tmp_path,
            f"tp{size}-zero{stage}",
            attention__variant="hybrid",
            attention__frozen_heads="{0: 0.25, 1: 0.5}",
            attention__adapters="[channel_scale, low_rank, query_key_bias]",
            attention__low_rank=3,
            deepspeed__config=f"zero{stage}",
            parallel__tensor_model_parallel_size=size,
            schedule__steps=4,
        )

    def runs(*layouts: tuple[int, int]) -> dict[str, Any]:
        return {"runs": [{"overrides": overrides(*layout)} for layout in layouts]}

    (alone,) = run_ranks(1, WORKER, runs((1, 1)))
    for other in run_ranks(4, WORKER, runs((4, 1), (4, 2))):
        assert other["loss"] == pytest.approx(alone["loss"], rel=1e-6)
