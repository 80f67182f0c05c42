"""A rank that does not come: named within the timeout, which is kept to the second.

Every process ends.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pretrain.ranks.idle import PATIENCE
from tests.command_line import logged_steps, started, wait_until
from tests.ranks import function_on_warm_ranks, run_ranks
from tests.tiny import tiny_overrides

SECONDS = 8
WORKER = "tests.distributed.workers.waiting:"


def test_a_stopped_rank_is_named_and_all_processes_end(tiny_shards: Path, tmp_path: Path) -> None:
    overrides = tiny_overrides(
        tiny_shards, tmp_path, "run", schedule__steps=100_000, parallel__timeout_seconds=SECONDS
    )
    run, log = tmp_path / "run", tmp_path / "log"
    with started(overrides, 2, log) as launcher:
        wait_until(lambda: len(logged_steps(run)) > 5, launcher, "the first steps")
        ranks = {child.environ()["RANK"]: child for child in launcher.children()}
        stopped = time.monotonic()
        os.kill(ranks["1"].pid, signal.SIGSTOP)
        wait_until(lambda: "error:" in log.read_text(), launcher, "the sentence")
        waited = time.monotonic() - stopped
        assert launcher.wait(timeout=60) == 2
        assert not any(rank.is_running() for rank in ranks.values())
    assert SECONDS - 1 < waited < SECONDS + 4, waited
    errors = [line for line in log.read_text().splitlines() if "rror" in line]
    assert len(errors) == 1, log.read_text()
    assert re.match(
        rf"error: rank 1 on \S+ \(last seen at .*\) gave no sign while rank 0 waited {SECONDS} s "
        r"\(parallel\.timeout_seconds\) at step \d+, .*; then the same command continues from its "
        r"start: no step is saved$",
        errors[0],
    )


@pytest.mark.slow
def test_ranks_that_were_all_suspended_continue_or_say_so(
    tiny_shards: Path, tmp_path: Path
) -> None:
    """As by `scontrol suspend`, for longer than a collective waits."""
    overrides = tiny_overrides(
        tiny_shards,
        tmp_path,
        "run",
        schedule__steps=100_000,
        checkpoint__every=5,
        parallel__timeout_seconds=SECONDS,
    )
    run, log = tmp_path / "run", tmp_path / "log"
    with started(overrides, 2, log) as launcher:
        wait_until((run / "checkpoints" / "latest").exists, launcher, "a checkpoint")
        ranks = launcher.children()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                os.kill(rank.pid, number)
            if number == signal.SIGSTOP:
                time.sleep(2 * SECONDS)
        steps = len(logged_steps(run))
        wait_until(
            lambda: len(logged_steps(run)) > steps + 5 or "error:" in log.read_text(),
            launcher,
            "further steps, or the sentence",
        )
        errors = [line for line in log.read_text().splitlines() if "rror" in line]
        if errors:
            assert launcher.wait(timeout=60) == 1
            assert len(errors) == 1, log.read_text()
            sentence = re.match(
                r"error: rank \d on \S+ was suspended for \d+ s at step \d+, .*; the same command "
                r"continues from step (\d+), the newest saved$",
                errors[0],
            )
            assert sentence, errors[0]
            assert (run / "checkpoints" / f"step_{int(sentence[1]):08d}" / "COMPLETE").exists()


def the_error(worker: str, payload: dict[str, Any]) -> str:
    """The only line of two ranks about an error, after which they end with code 2."""
    asked = {"timeout": 2, **payload}
    done = function_on_warm_ranks(2, WORKER + worker, asked, timeout=120)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if "rror" in line]
    return error


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (
            "",
            r"error: rank 1 on \S+ \(last seen at reading a slow disk\) did not come while rank 0 "
            r"waited 2 s \(parallel\.timeout_seconds\) at the sum of all; look at what holds it",
        ),
        (
            "the file system takes no byte",
            r"error: .* at the sum of all: the file system takes no byte; then the same command",
        ),
    ],
    ids=["one rank", "every rank"],
)
def test_what_a_rank_that_does_not_come_does_or_what_holds_all_is_said(
    held: str, sentence: str
) -> None:
    assert re.match(sentence, the_error("one_is_busy", {"held": held}))


@pytest.mark.parametrize(
    ("readers", "held"),
    [([0, 1], ""), ([0], ""), ([0], "the file system takes no byte")],
    ids=["all ranks", "rank 0", "rank 0, for all"],
)
def test_a_file_that_does_not_answer_is_named(
    readers: list[int], held: str, tmp_path: Path
) -> None:
    pipe = tmp_path / "COMPLETE"
    os.mkfifo(pipe)
    payload = {"pipe": str(pipe), "readers": readers, "held": held}
    error = the_error("all_read_a_pipe", payload)
    assert re.match(r"error: rank [01] on \S+ .*at finding the newest checkpoint", error), error
    why = held or f"{pipe} does not answer; look at its file system"
    assert f": {why}; then the same command" in error


def test_ranks_wait_for_rank_0_for_longer_than_a_collective_may_take() -> None:
    """And idle for longer than a rank may wait for a file."""
    payload = {"timeout": 2, "seconds": 2 * PATIENCE + 1}
    assert run_ranks(2, WORKER + "rank_0_works_long", payload) > payload["seconds"]


def test_a_rank_0_that_hangs_at_work_for_which_others_wait_is_found(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    error = the_error("rank_0_hangs_at_work", {"pipe": str(tmp_path / "pipe")})
    assert re.match(r"error: rank 0 on \S+ .*at the order of the samples.*pipe does not ans", error)


def test_of_two_ranks_that_end_for_different_waits_one_speaks() -> None:
    done = function_on_warm_ranks(2, WORKER + "two_end", {}, timeout=120)
    assert [line for line in done.stderr.splitlines() if "rror" in line] == ["error: of a save"]


def test_every_group_has_the_timeout_to_the_second() -> None:
    assert run_ranks(2, WORKER + "timeouts", {"timeouts": [20, 119]}) == [[20.0], [119.0]]
