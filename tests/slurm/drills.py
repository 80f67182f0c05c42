"""Submitting the shipped scripts with a tiny model, and checking what is left on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command_line import checkpoint_tensors, deterministic_metrics, equal, logged_steps
from tests.ranks import ROOT
from tests.slurm.cluster import Cluster, Job, wait_until
from tests.tiny import tiny_overrides

STEPS = 8
SHAPE = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=60")
"""Two nodes of two ranks; for the rest, GPUs included, the scripts ask as they are shipped."""


def training_overrides(shards: Path, runs: Path, name: str, **changes: object) -> list[str]:
    return tiny_overrides(
        shards,
        runs,
        name,
        **{
            "attention__variant": "orthogonal",
            "model__dropout": 0.1,
            "parallel__tensor_model_parallel_size": 2,
            "parallel__timeout_seconds": 600,
            "schedule__steps": STEPS,
            "checkpoint__every": 2,
            **changes,
        },
    )


@dataclass(frozen=True)
class Submitted:
    """A training job of a drill."""

    cluster: Cluster
    number: int
    run: Path
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.is_file() else ""

    def describe(self) -> str:
        """For a failure: what Slurm, the job and its ranks said last."""
        parts = [str(self.cluster.jobs(self.number)), self.log]
        for path in sorted(self.run.glob("slurm/job_*/*.log")):
            parts += [f"--- {path.parent.name}/{path.name}", *path.read_text().splitlines()[-5:]]
        return "\n".join(parts)

    def wait_for_step(self, step: int, timeout: float = 300) -> None:
        """Until rank 0 is held before the next step."""
        wait_until(lambda: step in logged_steps(self.run), f"step {step}", timeout, self.describe)

    def wait_for_state(self, state: str, timeout: float = 300) -> None:
        wait_until(
            lambda: self.cluster.job(self.number).state == state,
            f"the job to be {state}",
            timeout,
            self.describe,
        )

    def end(self, timeout: float = 500) -> Job:
        (job,) = self.cluster.wait_for_end(self.number, timeout, self.describe)
        return job

    def segments(self, event: str = "begin") -> list[dict[str, Any]]:
        lines = (self.run / "slurm/segments.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == event]


class Drills:
    """Submits jobs to `cluster`; everything lies below `directory`."""

    def __init__(self, cluster: Cluster, shards: Path, directory: Path) -> None:
        self.cluster = cluster
        self.shards = shards
        self.directory = directory
        self.runs = directory / "runs"

    def environment(self, values: Mapping[str, object]) -> dict[str, str]:
        """What a user of this machine would set, and a drill's own."""
        settings = {
            "ORA_PYTHON": sys.executable,
            "ORA_SITE": ROOT / "tests/slurm/__init__.py",  # an empty one, whatever this checkout has
            "ORA_DOCTOR_OPTIONS": "--gpus 0",  # the nodes' GPUs are links to /dev/null
            "PYTHONPATH": f"{ROOT / 'tests/slurm/hold'}:{ROOT}",
            **values,
        }
        return {key: str(value) for key, value in settings.items()}

    def train(
        self,
        name: str,
        *options: str,
        settings: Mapping[str, object] | None = None,
        bad_node: bool = False,
        **changes: object,
    ) -> Submitted:
        """Submit slurm/pretrain_large.sh for a tiny run, off the bad node unless it is wanted.

        Args:
            options: of sbatch.
            settings: variables; no doctor unless ORA_DOCTOR is 1 (it costs as much as a start).
            changes: section__key=value.
        """
        where = () if bad_node else (f"--exclude={self.cluster.bad_node}",)
        log = self.directory / "logs" / f"{name}-%j.log"
        log.parent.mkdir(exist_ok=True)
        number = self.cluster.sbatch(
            *SHAPE,
            *where,
            *options,
            f"--output={log}",
            "slurm/pretrain_large.sh",
            *training_overrides(self.shards, self.runs, name, **changes),
            environment=self.environment({"ORA_CONFIG": "demo", "ORA_DOCTOR": 0} | dict(settings or {})),
        )
        path = Path(str(log).replace("%j", str(number)))
        return Submitted(self.cluster, number, self.runs / name, path)


def assert_finished_like(job: Submitted, reference: Path) -> None:
    """The job's run has every step once, and metrics and weights of the uninterrupted one, bit for bit."""
    assert (job.run / "state").read_text() == "finished\n", job.describe()
    assert_same_run(job.run, reference)


def assert_same_run(run: Path, reference: Path) -> None:
    assert logged_steps(run) == list(range(1, STEPS + 1))
    assert deterministic_metrics(run) == deterministic_metrics(reference)
    last = f"checkpoints/step_{STEPS:08d}"
    ours, theirs = checkpoint_tensors(run / last), checkpoint_tensors(reference / last)
    assert ours.keys() == theirs.keys() and len(ours) > 50
    assert [place for place in ours if not equal(ours[place], theirs[place])] == []
