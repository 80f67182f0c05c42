"""Held-out losses in any layout, beside every sample on its own."""

from pathlib import Path
from typing import Any

import pytest

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


def test_held_out_losses_are_those_of_the_samples_one_by_one(
    tiny_shards: Path, tmp_path: Path
) -> None:
    overrides = [
        tiny_overrides(
            tiny_shards,
            tmp_path,
            f"held-out-{size}-{micro}-{stage}",
            model__dropout=0.5,  # must be off
            model__init_std=0.2,  # samples have losses of their own
            data__validation_samples=7,
            data__micro_batch_size=micro,
            data__global_batch_size=2 * micro,
            parallel__tensor_model_parallel_size=size,
            deepspeed__config=f"zero{stage}",
            telemetry__tensorboard="false",
        )
        for size, micro, stage in HELD_OUT
    ]
    worker = "tests.distributed.workers.training:held_out"
    reports: list[dict[str, Any]] = run_ranks(2, worker, {"runs": overrides})
    reference = reports[0]["one_by_one"]
    assert list(reference) == list(SOURCES)
    assert {len(losses) for losses in reference.values()} == {7}
    assert max(reference["PydocTopics"]) > 1.01 * min(reference["PydocTopics"])
    for layout, report in zip(HELD_OUT, reports, strict=True):
        assert report["training_again"]
        for source in SOURCES:
            loss, tokens = report["found"][source]
            assert tokens == 7 * 32
            assert loss == pytest.approx(sum(report["one_by_one"][source]), rel=1e-6), (
                layout,
                source,
            )
            assert loss == pytest.approx(sum(reference[source]), rel=1e-5), (layout, source)
