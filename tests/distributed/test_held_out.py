"""Held-out losses in any layout, beside every sample on its own.

Dropout under tensor parallelism.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from pretrain.runs.metrics_file import read_metrics
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

HELD_OUT = [  # (tensor parallel size, micro batch size, ZeRO stage), 7 samples a source on 2 ranks
    (1, 2, 1),
    (1, 3, 1),
    (1, 2, 3),
    (2, 4, 1),
    (2, 7, 1),
]
SOURCES = ("PydocTopics", "StdlibComments", "StdlibDocstrings")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held-out")


@pytest.fixture(scope="module")
def pair(tiny_shards: Path, runs: Path) -> dict[str, Any]:
    """What two ranks answer."""

    def overrides(name: str, **changes: object) -> list[str]:
        return tiny_overrides(tiny_shards, runs, name, telemetry__tensorboard="false", **changes)

    payload = {
        "held_out": [
            overrides(
                f"held-out-{size}-{micro}-{stage}",
                model__dropout=0.5,  # must be off
                model__init_std=0.2,  # samples have losses of their own
                data__validation_samples=7,
                data__micro_batch_size=micro,
                data__global_batch_size=2 * micro,
                parallel__tensor_model_parallel_size=size,
                deepspeed__config=f"zero{stage}",
            )
            for size, micro, stage in HELD_OUT
        ],
        "runs": [
            overrides(
                f"dropout-sp-{sequence_parallel}",
                model__dropout=0.2,
                precision__dtype="bf16",
                schedule__steps=2,
                parallel__tensor_model_parallel_size=2,
                parallel__sequence_parallel=sequence_parallel,
            )
            for sequence_parallel in (False, True)
        ],
    }
    return run_ranks(2, "tests.distributed.workers.training:held_out", payload)


def test_held_out_losses_are_those_of_the_samples_one_by_one(pair: dict[str, Any]) -> None:
    reference = pair["held_out"][0]["one_by_one"]
    assert list(reference) == list(SOURCES) and {len(losses) for losses in reference.values()} == {
        7
    }
    assert max(reference["PydocTopics"]) > 1.01 * min(reference["PydocTopics"])
    for layout, report in zip(HELD_OUT, pair["held_out"], strict=True):
        assert report["training_again"]
        for source in SOURCES:
            loss, tokens = report["found"][source]
            assert tokens == 7 * 32
            assert loss == pytest.approx(sum(report["one_by_one"][source]), rel=1e-6), (
                layout,
                source,
            )
            assert loss == pytest.approx(sum(reference[source]), rel=1e-5), (layout, source)


def test_dropout_with_tensor_and_sequence_parallelism_trains(
    pair: dict[str, Any], runs: Path
) -> None:
    assert pair["runs"] == ["finished", "finished"]
    for sequence_parallel in (False, True):
        records = read_metrics(runs / f"dropout-sp-{sequence_parallel}" / "metrics.jsonl")
        losses = [record["loss/train"] for record in records]
        assert len(losses) == 2 and all(map(math.isfinite, losses))
