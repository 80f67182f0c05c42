"""Drills on a real Slurm: a run ends as the uninterrupted one, whatever happens to its jobs.

The jobs are the shipped scripts on two virtual nodes. Those that wait longest come first.
"""

from __future__ import annotations

import json
import shutil
import time

import pytest

from tests.command_line import logged_steps
from tests.ranks import ROOT
from tests.slurm.drills import STEPS, Drills, drill

pytestmark = pytest.mark.timeout(1500)


@drill(nodes=4)
def test_preemption_a_killed_rank_and_lost_nodes(drills: Drills) -> None:
    """One job survives all of them: every start of its ranks takes a core for seconds."""
    # Any srun option makes the script start all of its Python by srun, as containers may need.
    settings = {"HOLD_AT": "4,7,9,11", "ORA_SRUN_OPTIONS": "--mpi=none"}
    cluster = drills.cluster
    job = drills.train("unlucky", settings=settings)
    job.wait_for_step(3)
    options = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap"]
    exclusion = cluster.nothing_but(*cluster.nodes_of(job.number))
    urgent = cluster.sbatch(exclusion, *options, "sleep 1")
    assert cluster.wait_for_end(urgent)[0].state == "COMPLETED"
    assert "SIGUSR1: the time limit or a preemption is near" in job.log
    job.wait_for_step(6)
    cluster.ranks(job.number)[1].kill()
    lost: list[str] = []
    try:
        # The second node, then the head node with the job script.
        for step, index in ((8, 1), (10, 0)):
            job.wait_for_step(step)
            lost.append(cluster.nodes_of(job.number)[index])
            cluster.kill_node(lost[-1])
        ended = job.end()
    finally:
        for node in lost:
            cluster.start_node(node)
    assert (ended.state, ended.restarts) == ("COMPLETED", 4), job.describe()
    # The preempted segment has finished its step and saved; the others continue from the last
    # checkpoint.
    assert [segment["progress"] for segment in job.segments()] == [0, 4, 6, 8, 10]
    assert "continues from progress 6" in job.log
    # Slurm forgets a preemption when it requeues: a later crash counts as one.
    assert [end["preempted"] for end in job.segments("end")] == [True, False, False]
    drills.assert_finished(job)


@drill(nodes=3)
def test_fewer_nodes(drills: Drills) -> None:
    """A run on two of three nodes finishes on the last one when two go down for good.

    It is of a checkout that is edited meanwhile, and finishes with the code that it began with.
    """
    checkout = drills.new_checkout()
    hold = ROOT / "tests/slurm/hold"
    settings = {"HOLD_AT": 4, "ORA_ROOT": checkout, "ORA_CODE": "", "PYTHONPATH": hold}
    job = drills.train("fewer_nodes", "--nodes=1-3", settings=settings)
    lost: list[str] = []
    try:
        job.wait_for_step(3)
        for file in ("slurm/lib.sh", "slurm/pin.sh", "pretrain/__init__.py"):
            (checkout / file).write_text("exit(9)\n")
        head, *lost = drills.cluster.nodes_of(job.number)
        assert len(lost) == 2, job.describe()
        drills.cluster.lose_nodes(lost)
        ended = job.end()
    finally:
        for node in lost:
            drills.cluster.start_node(node)
    assert (ended.state, ended.restarts, ended.nodes) == ("COMPLETED", 1, head), job.describe()
    assert (
        "trains on 2 ranks (2 x 1) of the job's 3 ranks (3 x 1): data.global_batch_size=8 is not "
        "divisible by data.micro_batch_size=2 times 3 data-parallel ranks\n"
    ) in job.log
    assert [(segment["progress"], segment["ranks"]) for segment in job.segments()] == [
        (0, 2),
        (2, 1),
    ]
    code = f" code: copy {checkout}/slurm/code/"
    assert job.log.count(code) == 2, job.log
    history = json.loads((job.run / "environment.json").read_text())["segments"]
    assert [(segment["first_step"], segment["world_size"]) for segment in history] == [
        (1, 2),
        (3, 1),
    ]
    drills.assert_finished_up_to_rounding(job, exact_steps=2)


@drill(nodes=2)
def test_two_nodes_of_two_ranks(drills: Drills) -> None:
    """Tensor parallel within a node, data parallel across; the export is made after the ranks."""
    nodes_seen = drills.new_directory("nodes_seen")
    site = nodes_seen.with_suffix(".sh")
    site.write_text(f"ora_every_node() {{ touch {nodes_seen}/$SLURMD_NODENAME; }}\n")
    settings = {"ORA_SITE": site, "ORA_DOCTOR": 1, "ORA_INTERFACE": "eth0"}
    at_end = {"checkpoint__export_at_end": "true"}
    job = drills.train("two_nodes", ranks=4, settings=settings, **at_end)
    ended = job.end()
    assert (ended.state, ended.restarts) == ("COMPLETED", 0), job.describe()
    drills.assert_finished(job)
    logs = job.run / f"slurm/job_{job.number}-restart_0"
    nodes = [path.stem.split("-")[1] for path in sorted(logs.glob("rank_*.log"))]
    # Ranks 0 and 1 share the layers.
    assert len(nodes) == 4 and nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert sorted(path.name for path in nodes_seen.iterdir()) == sorted(set(nodes))
    layout = json.loads((job.run / "environment.json").read_text())
    assert (layout["tensor_model_parallel_size"], layout["data_parallel_size"]) == (2, 2)
    assert json.loads((logs / "doctor.json").read_text())["bad_nodes"] == []
    assert (job.run / f"exports/step_{STEPS:08d}/export.json").is_file() and "exported" in job.log
    assert not any("exported" in path.read_text() for path in logs.glob("rank_*.log"))

    again = drills.train("two_nodes", ranks=4)  # finished is final
    assert again.end().state == "COMPLETED" and "is finished: nothing to do" in again.log
    assert len(job.segments()) == 1


@drill(nodes=1)
def test_bad_node_is_left_out(drills: Drills) -> None:
    """And the job does not wait for another: it may run on one node, too."""
    cluster = drills.cluster
    where = cluster.nothing_but(*drills.nodes, cluster.bad_node)  # the bad one is taken first
    job = drills.train("bad_node", where, "--nodes=1-2", settings={"ORA_DOCTOR": 1})
    ended = job.end()
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), job.describe()
    (requeued,) = [line for line in job.log.splitlines() if " requeued without " in line]
    left_out = requeued.split()[-1].split(",")  # those that the drill left out, and now the bad one
    assert sorted(left_out) == sorted(set(cluster.nodes) - set(drills.nodes)), job.log
    assert "/dev/shm" in job.log
    assert [segment["ranks"] for segment in job.segments()] == [2, 1]
    drills.assert_finished_up_to_rounding(job, exact_steps=0)


@drill(nodes=2)
def test_scancel_saves_and_stays_dead(drills: Drills) -> None:
    job = drills.train("cancelled", settings={"HOLD_AT": 4})
    job.wait_for_step(3)
    drills.cluster.output_of(f"scancel {job.number}")
    assert job.end().state == "CANCELLED", job.describe()
    ended = time.monotonic()
    assert (job.run / "state").read_text() == "stopped\n", job.describe()
    assert max(logged_steps(job.run)) == 4
    assert (job.run / "checkpoints/step_00000004/COMPLETE").is_file()

    again = drills.train("cancelled")
    assert again.end().state == "COMPLETED", again.describe()
    drills.assert_finished(again)
    # A requeued job would wait 7 s on this cluster.
    time.sleep(max(0.0, ended + 12 - time.monotonic()))
    after = drills.cluster.job(job.number)
    assert (after.state, after.restarts) == ("CANCELLED", 0)


@drill(nodes=2)
def test_mistakes_are_not_requeued(drills: Drills) -> None:
    """One that the script sees, and one that only the ranks can see."""
    script = drills.train("mistake", model__hidden_sizes=32)
    shutil.copytree(drills.references.uninterrupted(2), drills.runs / "changed")
    changes = {"attention__variant": "vanilla", "schedule__steps": STEPS + 2}
    ranks = drills.train("changed", **changes)
    ended = script.end()
    assert (ended.state, ended.restarts, ended.exit_code) == ("FAILED", 0, "2:0"), script.describe()
    said = [line for line in script.log.splitlines() if line.startswith("error: ")]
    assert any("hidden_sizes" in line for line in said)
    ended = ranks.end()
    assert (ended.state, ended.restarts) == ("FAILED", 0), ranks.describe()
    assert "error: refused, and would be again: " in ranks.log and "attention.variant" in ranks.log
