"""`python slurm/submit.py` against a real Slurm: acceptance, dependencies, refusals."""

from __future__ import annotations

import sys

from tests.command_line import assert_refused
from tests.slurm.cluster import Cluster

SITE = {"ORA_SITE": "/dev/null"}
"""In place of the site file that this checkout may have."""
SUBMIT = (sys.executable, "slurm/submit.py")


def test_the_dry_runs_own_commands_are_accepted_as_printed(cluster: Cluster) -> None:
    """By a shell: the tests of every script, and the chain with its dependencies, on hold."""
    hold = ("--sbatch", "all=--hold --comment='two words'")
    for config in ("small", "base", "large"):
        printed = cluster.run(*SUBMIT, config, "--dry-run", *hold, environment=SITE)
        steps = ["download", "tokenizer", "tokenize", "merge"]
        jobs = [*steps, f"{config}_vanilla", f"{config}_orthogonal", "compare"]
        ids = f"echo {' '.join(f'$job_{job}' for job in jobs)}"
        done = cluster.run("bash", "-euc", f"{printed.stdout}\n{ids}", environment=SITE)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) == 7
        cluster.output_of(f"scancel {done.stdout}")


def test_what_sbatch_refuses_is_one_sentence_and_nothing_is_submitted(cluster: Cluster) -> None:
    queue = cluster.output_of("squeue -h")
    for option, reason in (
        ("pretrain=--nodes=99", "slurm/pretrain_large.sh (ora-large-vanilla)"),
        ("pretrain=--gres=gpu:9", "Requested node configuration is not available"),
        ("all=--partition=nowhere", "invalid partition specified: nowhere"),
        ("merge=--no-such-option", "slurm/merge.sh (ora-merge)"),
    ):
        done = cluster.run(*SUBMIT, "large", f"--sbatch={option}", environment=SITE)
        assert_refused(done, "sbatch --test-only refuses", reason)
    assert cluster.output_of("squeue -h") == queue


HALF_A_CHAIN = """
import sys
sys.path.insert(0, "slurm")
from chain import ROOT, Job
from submit import submit
script = ROOT / "slurm" / "compare.sh"
good = Job("good", "compare", script, {}, ("--hold",))
bad = Job("bad", "compare", script, {}, ("--hold", "--partition=nowhere"), after=("good",))
submit([good, bad], {})
"""


def test_a_refusal_on_the_way_takes_back_what_was_submitted(cluster: Cluster) -> None:
    """As when a limit on jobs is reached, which --test-only cannot foresee."""
    queue = cluster.output_of("squeue -h")
    done = cluster.run(sys.executable, "-c", HALF_A_CHAIN)
    refused = "sbatch refused slurm/compare.sh (ora-bad): invalid partition specified: nowhere"
    assert done.stderr.splitlines()[-1].startswith(f"chain.SubmitError: {refused}")
    assert "; the 1 jobs submitted before it are cancelled (" in done.stderr
    assert cluster.output_of("squeue -h") == queue
