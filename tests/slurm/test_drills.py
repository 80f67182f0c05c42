"""What happens to jobs on a cluster, on a real Slurm: every run ends as the uninterrupted one, bit for bit.

The jobs are the shipped scripts on two virtual nodes of two ranks: tensor parallel within a node, data
parallel across.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.command_line import logged_steps
from tests.slurm.drills import STEPS, Drills, Submitted, assert_finished_like, assert_same_run

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def time_limited(drills: Drills) -> Submitted:
    """Started before the other drills: Slurm takes its time to send the signal."""
    return drills.train(
        "time_limit",
        *("--time=3", "--signal=B:USR1@120", "--nodelist=n1,n2"),
        settings={"HOLD_AT": "3,5", "ORA_MAX_STALLED_SEGMENTS": 20},
    )


@pytest.fixture(scope="module")
def crashing(drills: Drills, time_limited: Submitted) -> Submitted:
    """Dies before step 3 again and again."""
    limits = {"KILL_AT": 3, "ORA_MAX_STALLED_SEGMENTS": 2}
    return drills.train("crash_loop", "--nodelist=n1,n2", settings=limits)


@pytest.fixture(scope="module", autouse=True)
def waiting_jobs(time_limited: Submitted, crashing: Submitted) -> None:
    """Both jobs that mostly wait are in the queue before the first drill."""


def test_two_nodes_of_two_ranks(drills: Drills, uninterrupted: Path) -> None:
    settings = {
        "ORA_DOCTOR": 1,
        "ORA_PREFIX": "env ORA_TEST=1",
        "ORA_INTERFACE": "eth0" if drills.cluster.networks else "lo",
        "ORA_TIMEOUT_SECONDS": 500,
    }
    job = drills.train("two_nodes", settings=settings)
    ended = job.end()
    assert (ended.state, ended.restarts) == ("COMPLETED", 0), job.describe()
    assert_finished_like(job, uninterrupted)
    logs = job.run / f"slurm/job_{job.number}-restart_0"
    nodes = [path.stem.split("-")[1] for path in sorted(logs.glob("rank_*.log"))]
    assert len(nodes) == 4 and nodes[0] == nodes[1] != nodes[2] == nodes[3]  # ranks 0, 1 share the layers
    layout = json.loads((job.run / "environment.json").read_text())
    assert (layout["tensor_model_parallel_size"], layout["data_parallel_size"]) == (2, 2)
    assert json.loads((logs / "doctor.json").read_text())["bad_nodes"] == []

    again = drills.train("two_nodes")  # finished is final
    assert again.end().state == "COMPLETED" and "is finished: nothing to do" in again.log
    assert len(job.segments()) == 1


def test_preemption(drills: Drills, uninterrupted: Path) -> None:
    job = drills.train("preempted", "--nodelist=n3,n4", settings={"HOLD_AT": 4})
    job.wait_for_step(3)
    urgent = drills.cluster.sbatch(
        *("--partition=urgent", "--nodelist=n3,n4", "--nodes=2", "--exclusive", "--output=/dev/null"),
        *("--wrap", "sleep 1"),
    )
    assert drills.cluster.wait_for_end(urgent)[0].state == "COMPLETED"
    ended = job.end()
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), job.describe()
    assert [segment["progress"] for segment in job.segments()] == [0, 4]  # the step was finished, and saved
    assert_finished_like(job, uninterrupted)


def test_rank_killed_in_the_middle_of_a_step(drills: Drills, uninterrupted: Path) -> None:
    # Any srun option makes the script start all of its Python by srun, as containers may need.
    job = drills.train("rank_killed", settings={"HOLD_AT": 6, "ORA_SRUN_OPTIONS": "--mpi=none"})
    job.wait_for_step(5)
    drills.cluster.ranks(job.number)[2].kill()
    ended = job.end()
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), job.describe()
    assert [segment["progress"] for segment in job.segments()] == [0, 4]
    assert "goes on from progress 4" in job.log
    assert_finished_like(job, uninterrupted)


def test_lost_nodes(drills: Drills, uninterrupted: Path) -> None:
    job = drills.train("node_lost", settings={"HOLD_AT": "4,6"})
    lost = []
    for segment, step in enumerate((3, 5)):  # the second node, then the head node with the job script
        job.wait_for_step(step)
        nodes = drills.cluster.nodes_of(job.number)
        lost.append(nodes[1 - segment])
        drills.cluster.kill_node(lost[-1])
    ended = job.end()
    assert (ended.state, ended.restarts) == ("COMPLETED", 2), job.describe()
    assert [segment["progress"] for segment in job.segments()] == [0, 2, 4]
    assert_finished_like(job, uninterrupted)
    for node in lost:
        drills.cluster.start_node(node)


def test_scancel_saves_and_stays_dead(drills: Drills, uninterrupted: Path) -> None:
    job = drills.train("cancelled", settings={"HOLD_AT": 4})
    job.wait_for_step(3)
    drills.cluster.output_of("scancel", job.number)
    assert job.end().state == "CANCELLED", job.describe()
    assert (job.run / "state").read_text() == "stopped\n", job.describe()
    assert max(logged_steps(job.run)) == 4 and (job.run / "checkpoints/step_00000004/COMPLETE").is_file()
    time.sleep(12)  # a requeued job would wait 7 s on this cluster
    after = drills.cluster.job(job.number)
    assert (after.state, after.restarts) == ("CANCELLED", 0)

    again = drills.train("cancelled")
    assert again.end().state == "COMPLETED", again.describe()
    assert_finished_like(again, uninterrupted)


def test_bad_node_is_left_out(drills: Drills, uninterrupted: Path) -> None:
    if not drills.cluster.isolated:
        pytest.skip("nodes cannot differ here: that needs root")
    job = drills.train("bad_node", bad_node=True, settings={"ORA_DOCTOR": 1})
    ended = job.end()
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), job.describe()
    assert f"requeued without {drills.cluster.bad_node}" in job.log
    assert "/dev/shm" in job.log
    assert_finished_like(job, uninterrupted)


def test_mistakes_are_not_requeued(drills: Drills, uninterrupted: Path) -> None:
    job = drills.train("mistake", model__hidden_sizes=32)
    ended = job.end()
    assert (ended.state, ended.restarts, ended.exit_code) == ("FAILED", 0, "2:0"), job.describe()
    assert any(line.startswith("error: ") and "hidden_sizes" in line for line in job.log.splitlines())

    shutil.copytree(uninterrupted, drills.runs / "changed")  # this one only the ranks can see
    job = drills.train("changed", attention__variant="vanilla", schedule__steps=STEPS + 2)
    ended = job.end()
    assert (ended.state, ended.restarts) == ("FAILED", 0), job.describe()
    assert "error: refused, and would be again: " in job.log and "attention.variant" in job.log


def test_time_limit(time_limited: Submitted, uninterrupted: Path) -> None:
    ended = time_limited.end()
    assert ended.state == "COMPLETED" and ended.restarts >= 2, time_limited.describe()
    assert "SIGUSR1: the time limit or a preemption is near" in time_limited.log
    progress = [segment["progress"] for segment in time_limited.segments()]
    assert progress == sorted(progress) and len(progress) == ended.restarts + 1
    assert_finished_like(time_limited, uninterrupted)


def test_crash_loop(crashing: Submitted, drills: Drills, uninterrupted: Path) -> None:
    ended = crashing.end()
    assert (ended.state, ended.restarts) == ("FAILED", 2), crashing.describe()
    assert [segment["progress"] for segment in crashing.segments()] == [0, 2, 2]
    assert "error: crash loop: 2 segments in a row made no progress" in crashing.log
    mended = drills.train("crash_loop")
    assert mended.end().state == "COMPLETED", mended.describe()
    assert_same_run(mended.run, uninterrupted)
    assert STEPS in logged_steps(mended.run)
