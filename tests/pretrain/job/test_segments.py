"""What becomes of a Slurm job after a segment: decided from the run directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.job.job_kinds import Training, errors_in
from pretrain.job.segments import REQUEUE, STOP, Decision, Ending, Segments, SlurmJob
from pretrain.runs.directory import CONTINUE, FINISHED, RUNNING, STOPPED, RunDirectory
from tests.fabricated_checkpoints import bare_checkpoint
from tests.ranks import ROOT

FIRST = SlurmJob("7", 0, "n[1-2]")


def segments(run: Path) -> Segments:
    return Segments(Training(run))


def restart(number: int) -> SlurmJob:
    return SlurmJob("7", number, "n[1-2]")


def end(run: Path, state: str | None, ending: Ending, job: SlurmJob = FIRST) -> Decision:
    record = segments(run)
    record.begin(job, 3)
    if state is not None:
        RunDirectory(run).write_state(state)
    return record.end(job, ending, 3)


@pytest.mark.parametrize(
    ("state", "ending", "action", "said"),
    [
        (FINISHED, Ending(0, "RUNNING"), FINISHED, "is finished"),
        # The state outranks all else.
        (FINISHED, Ending(137, "COMPLETING"), FINISHED, "is finished"),
        (CONTINUE, Ending(0, "RUNNING"), REQUEUE, "more to do"),
        (CONTINUE, Ending(138, "RUNNING"), REQUEUE, "more to do"),
        # scancel: never resurrected.
        (CONTINUE, Ending(0, "COMPLETING"), STOP, "the job is COMPLETING"),
        (RUNNING, Ending(143, "COMPLETING"), STOP, "the job is COMPLETING"),
        (RUNNING, Ending(0, "UNKNOWN"), STOP, "the job is UNKNOWN"),
        (STOPPED, Ending(0, "RUNNING"), STOP, "as SIGTERM asked"),
        (STOPPED, Ending(0, "RUNNING", preempted=True), REQUEUE, "before preemption"),
        (RUNNING, Ending(137, "RUNNING"), REQUEUE, "continues from progress 0 (1 of 3 segments"),
        (RUNNING, Ending(143, "RUNNING", refused="loss is nan"), STOP, "be again: loss is nan"),
        (None, Ending(1, "RUNNING"), REQUEUE, "crashed with exit code 1"),
        (None, Ending(0, "RUNNING", asked=True), REQUEUE, "before the time limit"),
    ],
)
def test_decisions(
    tmp_path: Path, state: str | None, ending: Ending, action: str, said: str
) -> None:
    decision = end(tmp_path, state, ending)
    assert decision.action == action and said in decision.reason


def test_a_crash_is_not_taken_for_the_end_of_the_segment_before(tmp_path: Path) -> None:
    bare_checkpoint(RunDirectory(tmp_path), 4)
    for state in (CONTINUE, FINISHED, STOPPED):
        RunDirectory(tmp_path).write_state(state)
        assert end(tmp_path, None, Ending(1, "RUNNING")).reason.startswith("crashed")
        assert RunDirectory(tmp_path).state() == state  # of what was finished nothing is lost


def test_what_another_job_of_the_number_refused_is_forgotten(tmp_path: Path) -> None:
    refused = segments(tmp_path).begin(FIRST, 3) / "refused"
    refused.write_text("checkpoint X is damaged")
    assert segments(tmp_path).begin(FIRST, 3) == refused.parent and not refused.exists()


@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may do everything"
)
def test_a_state_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "state").touch(mode=0o000)
    as_anybody = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [*(as_anybody if os.geteuid() == 0 else []), sys.executable, "-m", "pretrain.job"]
    command += ["end-training", str(tmp_path), "--exit-code", "1", "--job-state", "RUNNING"]
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{tmp_path / 'state'}" in done.stderr


def test_crash_loop_is_counted_by_beginnings_without_a_newer_checkpoint(tmp_path: Path) -> None:
    record = segments(tmp_path)
    crash = Ending(1, "RUNNING")
    for number, step in enumerate((2, 4, 6)):  # crashes, but each got further
        record.begin(restart(number), 3)
        bare_checkpoint(RunDirectory(tmp_path), step)
        assert record.end(restart(number), crash, 3).action == REQUEUE
    bare_checkpoint(RunDirectory(tmp_path), 8, marked=False)
    record.begin(restart(3), 3)  # its node died: no end
    record.begin(restart(4), 3)
    assert record.end(restart(4), crash, 3).action == REQUEUE
    record.begin(restart(5), 3)
    decision = record.end(restart(5), crash, 3)
    assert decision.action == STOP and decision.reason.startswith("crash loop: 3 segments in a row")
    with pytest.raises(
        UserError, match=r"crash loop: 3 segments in a row made no progress \(all began at 6\)"
    ):
        record.begin(restart(6), 3)
    record.begin(SlurmJob("8", 0, "n1"), 3)  # a new submission: somebody has looked at it
    assert record.stalled(SlurmJob("8", 0, "n1"), 6) == 1


def test_preemptions_before_the_first_checkpoint_are_not_a_crash_loop(tmp_path: Path) -> None:
    record = segments(tmp_path)
    for number in range(5):  # more often than crashes may
        record.begin(restart(number), 3)
        record.end(restart(number), Ending(143, "COMPLETING", preempted=True), 3)
    assert record.stalled(restart(5), 0) == 0
    for number in (5, 6):
        record.begin(restart(number), 3)
        assert record.end(restart(number), Ending(1, "RUNNING"), 3).action == REQUEUE
    record.begin(restart(7), 3)
    assert record.end(restart(7), Ending(1, "RUNNING"), 3).reason.startswith("crash loop: 3 segm")


def test_a_job_number_that_comes_again_begins_at_0(tmp_path: Path) -> None:
    record = segments(tmp_path)
    for number in range(2):
        record.begin(restart(number), 3)
    record.begin(restart(0), 3)
    assert record.stalled(FIRST, 0) == 1


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    record = segments(tmp_path)
    record.begin(FIRST, 3)
    with record.path.open("a") as file:
        file.write('{"event": "end", "jo')
    record.begin(restart(1), 3)
    record.begin(restart(2), 3)
    assert record.stalled(FIRST, 0) == 3


def test_a_record_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    record = segments(tmp_path)
    record.begin(FIRST, 3)
    record.path.unlink()
    record.path.symlink_to("/dev/full")
    full = rf"{record.path} cannot be written \(No space left on device; .*make room there"
    with pytest.raises(UserError, match=full):
        record.end(FIRST, Ending(1, "RUNNING"), 3)
    with pytest.raises(UserError, match=full):
        record.begin(restart(1), 3)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/slurm.* cannot be written \(Not a directory"):
        segments(tmp_path / "file").begin(FIRST, 3)


def test_bad_nodes_are_left_out_up_to_a_number(tmp_path: Path) -> None:
    record = segments(tmp_path)
    record.begin(FIRST, 3)
    assert record.exclude(FIRST, ["n3"], ["n9"], 2) == ["n3", "n9"]
    record.begin(restart(1), 3)
    assert record.exclude(restart(1), ["n4"], ["n3", "n9"], 2) == ["n3", "n4", "n9"]
    assert record.stalled(restart(2), 0) == 0  # not the run's fault
    with pytest.raises(
        UserError, match=r"3 nodes failed the preflight \(n3, n4, n5\), ORA_MAX_EXCLUDED_NODES=2"
    ):
        record.exclude(restart(2), ["n5"], [], 2)


def test_the_ranks_own_sentences_are_found_once_each(tmp_path: Path) -> None:
    for rank in range(3):
        text = "step 1/8  loss 6.2\nTraceback (most recent call last):\nValueError: no such thing\n"
        (tmp_path / f"rank_00{rank}-n1.log").write_text(text)
    (tmp_path / "rank_003-n2.log").write_text("error: the training loss is nan at step 3\n")
    assert errors_in(tmp_path) == [
        "rank_000-n1.log: ValueError: no such thing",
        "rank_003-n2.log: error: the training loss is nan at step 3",
    ]
