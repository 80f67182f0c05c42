"""The private Slurm of the drills.

Nodes are what they should be, and nothing of it outlives the tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ranks import ROOT, rank_environment
from tests.slurm.cluster import require_slurm, wait_until
from tests.slurm.drills import Drills
from tests.slurm.supervisor import environment_of

HARNESS = """
import time
from tests.slurm.cluster import Cluster, wait_until
with Cluster(nodes=2) as cluster:
    job = cluster.sbatch("--output=/dev/null", "--nodes=2", "--wrap", "srun sleep 1000")
    wait_until(lambda: cluster.job(job).state == "RUNNING", "the job", 60)
    print(cluster.directory, flush=True)
    time.sleep(1000)
"""


def test_nodes_have_names_and_addresses_of_their_own(drills: Drills) -> None:
    if not drills.cluster.networks:
        pytest.skip("no network namespaces here: all nodes share the loopback address")
    one_line = 'echo "$(hostname) $(hostname -i)"'  # written at once: the nodes' lines may not mix
    with drills.cluster.reserve(2) as nodes:
        only = drills.cluster.nothing_but(*nodes)
        said = drills.cluster.output_of("srun", "--nodes=2", only, "sh", "-c", one_line)
    names, addresses = set(said.split()[::2]), set(said.split()[1::2])
    assert len(names) == len(addresses) == 2
    assert all(address.startswith("10.77.0.") for address in addresses)


@pytest.mark.parametrize("mode", ["networks", "loopback", "plain"])
def test_nothing_is_left_when_the_tests_are_killed(mode: str) -> None:
    require_slurm()
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS],
        cwd=ROOT,
        env=rank_environment() | {"ORA_TEST_SLURM": mode},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = harness.stdout.readline().strip()
        assert said, "the cluster did not start: its own words are above"
        directory = Path(said)
        daemons = 4  # munged, slurmctld, two slurmd; the rest are the job's
        wait_until(lambda: len(_processes_of(directory)) > daemons + 4, "the job's processes", 60)
    finally:
        harness.kill()
        harness.wait()
        harness.stdout.close()
    wait_until(lambda: not _processes_of(directory), "its processes to end", 60)
    wait_until(lambda: not directory.exists(), "its directory to go", 60)


def _processes_of(directory: Path) -> list[psutil.Process]:
    mark = str(directory / "slurm.conf")
    return [p for p in psutil.process_iter() if environment_of(p).get("SLURM_CONF") == mark]
