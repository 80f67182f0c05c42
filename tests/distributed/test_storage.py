"""A file system that takes no more: one sentence, nothing half-written.

The run goes on once there is room.

On a real one: a small tmpfs that fills up (for root only).
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrain.runs.directory import RunDirectory
from tests.command_line import deterministic_metrics
from tests.mounts import mounted
from tests.ranks import function_on_warm_ranks, train_to_end
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

STEPS, EVERY = 12, 4
WORKER = "tests.distributed.workers.storage:"
Overrides = Callable[..., list[str]]


@pytest.fixture(scope="module")
def overrides(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Overrides:
    orders = tmp_path_factory.mktemp("orders")

    def of(runs: Path, every: int = EVERY) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            runs,
            "run",
            schedule__steps=STEPS,
            checkpoint__every=every,
            checkpoint__keep_last=1,
            data__cache_directory=orders,
        )

    return of


@pytest.fixture(scope="module")
def undisturbed(overrides: Overrides, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """{ranks: run directory}"""
    places = {ranks: tmp_path_factory.mktemp("undisturbed") for ranks in (1, 2)}
    for ranks, runs in places.items():
        train_to_end(overrides(runs), ranks)
    return {ranks: runs / "run" for ranks, runs in places.items()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "size=16m"):
        yield disk


CHECKPOINT = (  # or a record, where the checkpoint before it has left no room even for that
    r"error: .*(run/metrics|run/tensorboard|checkpoints/step_00000008)\S* cannot be written \(No "
    r"space left on device; (about \d+\.\d [KM]B are needed and )?\S+ \w+ are free\); make room "
    r"there, then the same"
)
FULL = {  # ranks, what is about to be written, what is said, what is complete then
    "checkpoint of one of two ranks": (2, "save", CHECKPOINT, ["step_00000004"]),
    "metrics.jsonl": (
        1,
        "record",
        r"error: .*run/(metrics\.jsonl|tensorboard/\S+) cannot be written \(No space left on "
        r"device; 0 bytes are free\); make room",
        [],
    ),
    "summary": (
        1,
        "close",
        r"error: .*run/\S+ cannot be written \(No space left on device; 0 bytes are free\); make "
        r"room there",
        ["step_00000012"],
    ),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_once_there_is_room(
    what: str, overrides: Overrides, small_disk: Path, undisturbed: dict[int, Path]
) -> None:
    ranks, moment, sentence, complete = FULL[what]
    settings = overrides(small_disk, every=0 if moment == "record" else EVERY)
    payload = {"overrides": settings, "moment": moment, "filler": str(small_disk / "filler")}
    done = function_on_warm_ranks(ranks, WORKER + "on_a_full_disk", payload, timeout=120)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == ranks and len(set(errors)) == 1 and re.match(sentence, errors[0]), (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    run = RunDirectory(small_disk / "run")
    assert [path.name for path in run.complete_checkpoints()] == complete
    assert [path.name for path in run.checkpoints.glob("step_*")] == complete
    assert (
        not list(run.path.glob(".*"))
        and not list(run.path.rglob("*.tmp"))
        and not (run.path / "lock").exists()
    )

    (small_disk / "filler").unlink()
    train_to_end(overrides(small_disk), ranks)
    assert run.state() == "finished"
    assert deterministic_metrics(run.path) == deterministic_metrics(undisturbed[ranks])
