"""A finished training leaves nothing running: a process may train as often as it likes."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow
TRAININGS, WARM = 8, 4  # each kind twice
KINDS = [  # stages keep hold of the groups in different places; so does a change of phase
    {"deepspeed__config": "zero1"},
    {"deepspeed__config": "zero2", "attention__variant": "unfreeze"},
    {"deepspeed__config": "zero3"},
    {"parallel__tensor_model_parallel_size": 2, "precision__dtype": "bf16"},
]


def test_threads_and_files_of_a_process_do_not_grow_with_its_trainings(
    tiny_shards: Path, tmp_path: Path
) -> None:
    overrides = [
        tiny_overrides(
            tiny_shards,
            tmp_path,
            f"training-{number}",
            **{
                "schedule__steps": 4,
                "schedule__warmup_steps": 1,
                "data__validation_samples": 2,
                "telemetry__tensorboard": "false",
                **KINDS[number % len(KINDS)],
            },
        )
        for number in range(TRAININGS)
    ]
    ranks = run_ranks(2, "tests.distributed.workers.release:held_after_each", {"runs": overrides})
    assert len(ranks) == 2
    for held in ranks:
        assert len(held) == TRAININGS
        after_warming_up, at_the_end = held[WARM - 1], held[-1]
        assert at_the_end["threads"] <= after_warming_up["threads"] < 16, held
        assert at_the_end["files"] <= after_warming_up["files"], held
        assert at_the_end["models"] == 0, held
