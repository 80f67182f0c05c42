"""The program in one test: two ranks train, stop, resume, and end as if never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import (
    assert_same_checkpoint,
    deterministic_metrics,
    logged_steps,
)
from tests.ranks import run_ranks, train_on_warm_ranks
from tests.tiny import tiny_overrides


@pytest.mark.distributed
def test_two_ranks_train_stop_and_resume_exactly(tiny_shards: Path, tmp_path: Path) -> None:
    def overrides(name: str) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            tmp_path,
            name,
            attention__variant="orthogonal",
            model__dropout=0.1,
            parallel__tensor_model_parallel_size=2,
            parallel__sequence_parallel=True,
            data__validate_every=3,
        )

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = train_on_warm_ranks(overrides("whole"), ranks=2)
    assert done.returncode == 0, done.stderr
    payload = {"overrides": overrides("stopped")}
    run_ranks(2, "tests.distributed.workers.designs:stop_and_continue", payload)
    assert (stopped / "state").read_text() == (whole / "state").read_text() == "finished\n"
    assert logged_steps(stopped) == list(range(1, 7))
    assert deterministic_metrics(stopped) == deterministic_metrics(whole)
    last = "checkpoints/step_00000006"
    assert_same_checkpoint(stopped / last, whole / last)
