"""Submitting the shipped scripts with a tiny model, and checking what is left on disk.

A drill is a function of `Drills` that submits jobs, does something to them and asserts what became
of them. Drills run side by side: they mostly wait, for Slurm's timers and for ranks that start.
`@drill(nodes=2)` makes one a test that starts nothing itself: before the first of them, all the
drills that this session has selected are started in a few threads, in their order; each test then
waits for its own.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import assert_same_checkpoint, deterministic_metrics, logged_steps
from tests.ranks import ROOT, train_on_warm_ranks
from tests.slurm.cluster import Cluster, Job, wait_until
from tests.tiny import tiny_overrides

STEPS = 12
"""So short that a step never is what a drill waits for."""
EVERY = 2
"""Steps from checkpoint to checkpoint."""
CODE = ("pretrain", "laboratory", "megatron_patches", "data_pipeline", "ds_configs", "slurm")
"""Folders that a job runs a copy of."""
AT_ONCE = 5
"""Drills in flight. Most compute nothing; each start of a training takes a core for a while."""


def training_overrides(
    shards: Path, runs: Path, name: str, ranks: int, **changes: object
) -> list[str]:
    """Settings of a tiny run: 2 ranks are data parallel, of 4 two pairs are tensor parallel."""
    return tiny_overrides(
        shards,
        runs,
        name,
        **{
            "attention__variant": "orthogonal",
            "model__dropout": 0.1,
            "parallel__tensor_model_parallel_size": ranks // 2,
            "parallel__timeout_seconds": 600,
            "schedule__steps": STEPS,
            "checkpoint__every": EVERY,
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
    ranks: int

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.is_file() else ""

    def describe(self) -> str:
        """For a failure: what Slurm, the job and its ranks said last."""
        parts = [str(self.cluster.jobs(self.number)), self.log]
        for path in sorted(self.run.glob("slurm/job_*/*.log")):
            parts += [f"--- {path.parent.name}/{path.name}", *path.read_text().splitlines()[-5:]]
        return "\n".join(parts)

    def wait_for_step(self, step: int, timeout: float = 500) -> None:
        """Wait until rank 0 is held before the next step, and the checkpoint up to there counts.

        It is written behind the training. Fails at once where the job ends instead.
        """
        checkpoint = self.run / f"checkpoints/step_{step // EVERY * EVERY:08d}/COMPLETE"

        def reached() -> bool:
            if step in logged_steps(self.run) and checkpoint.is_file():
                return True
            assert not self.cluster.is_over(self.number), self.describe()
            return False

        wait_until(reached, f"step {step}", timeout, self.describe, every=1.0)

    def end(self, timeout: float = 900) -> Job:
        (job,) = self.cluster.wait_for_end(self.number, timeout, self.describe)
        return job

    def segments(self, event: str = "begin") -> list[dict[str, Any]]:
        lines = (self.run / "slurm/segments.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == event]


class References:
    """The runs that the drills' runs must equal: the same without Slurm, never interrupted."""

    def __init__(self, shards: Path, runs: Path) -> None:
        self._shards = shards
        self._runs = runs
        self._one_at_a_time = threading.Lock()

    def uninterrupted(self, ranks: int) -> Path:
        """The run directory; trained when it is first asked for."""
        name = f"uninterrupted_{ranks}"
        with self._one_at_a_time:
            if not (self._runs / name).exists():
                done = train_on_warm_ranks(
                    training_overrides(self._shards, self._runs, name, ranks), ranks
                )
                assert done.returncode == 0, done.stderr
        return self._runs / name


@dataclass(frozen=True)
class Drills:
    """Submits jobs to `cluster`, on `nodes`; everything lies below `directory`."""

    cluster: Cluster
    shards: Path
    directory: Path
    references: References
    nodes: tuple[str, ...] = ()

    @property
    def runs(self) -> Path:
        return self.directory / "runs"

    @property
    def here(self) -> str:
        """The option that keeps a job on this drill's nodes."""
        return self.cluster.nothing_but(*self.nodes)

    def new_directory(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir()
        return path

    def new_checkout(self) -> Path:
        """Return a copy of this checkout's code, which a drill may edit."""
        copy = self.new_directory("checkout")
        ignored = ("__pycache__", "code", "logs", "site.sh")
        for folder in CODE:
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(*ignored))
        return copy

    def environment(self, values: Mapping[str, object]) -> dict[str, str]:
        """Return the settings that a user of this machine would make, and a drill's own."""
        settings = {
            "ORA_PYTHON": sys.executable,
            "ORA_CODE": ROOT,  # no copy of each job's own is left in this checkout
            "ORA_SITE": ROOT
            / "tests/slurm/__init__.py",  # an empty one, whatever this checkout has
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
        ranks: int = 2,
        **changes: object,
    ) -> Submitted:
        """Submit slurm/pretrain_large.sh for a tiny run on two nodes.

        Args:
            options: of sbatch; for the rest, GPUs included, the script asks as it is shipped.
            settings: variables; no doctor unless ORA_DOCTOR is 1 (it costs as much as a start).
            ranks: 2 or 4, half of them on each node.
            changes: section__key=value.
        """
        log = self.directory / "logs" / f"{name}-%j.log"
        log.parent.mkdir(exist_ok=True)
        defaults = {"ORA_CONFIG": "demo", "ORA_DOCTOR": 0, "ORA_RANKS_PER_NODE": ranks // 2}
        shape = ["--nodes=2", "--cpus-per-task=1", "--time=60", self.here, *options]
        overrides = training_overrides(self.shards, self.runs, name, ranks, **changes)
        number = self.cluster.sbatch(
            *shape,
            f"--output={log}",
            "slurm/pretrain_large.sh",
            *overrides,
            environment=self.environment(defaults | dict(settings or {})),
        )
        path = Path(str(log).replace("%j", str(number)))
        return Submitted(
            cluster=self.cluster, number=number, run=self.runs / name, log_path=path, ranks=ranks
        )

    def assert_finished(self, job: Submitted) -> None:
        """The job's run is the uninterrupted one, bit for bit: steps, metrics, weights."""
        assert (job.run / "state").read_text() == "finished\n", job.describe()
        assert_same_run(job.run, self.references.uninterrupted(job.ranks))

    def assert_finished_up_to_rounding(self, job: Submitted, exact_steps: int) -> None:
        """As `assert_finished`, but after the first steps losses differ by rounding."""
        assert (job.run / "state").read_text() == "finished\n", job.describe()
        assert logged_steps(job.run) == list(range(1, STEPS + 1))
        ours, theirs = map(
            deterministic_metrics, (job.run, self.references.uninterrupted(job.ranks))
        )
        assert ours[:exact_steps] == theirs[:exact_steps]
        losses = [[record["loss/train"] for record in records] for records in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def assert_same_run(run: Path, reference: Path) -> None:
    assert logged_steps(run) == list(range(1, STEPS + 1))
    assert deterministic_metrics(run) == deterministic_metrics(reference)
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_checkpoint(run / last, reference / last, more_than=50)


@dataclass(frozen=True)
class Drill:
    """`script` on `nodes` nodes that are its own while it runs."""

    script: Callable[[Drills], None]
    nodes: int

    def run(self, drills: Drills) -> None:
        with drills.cluster.reserve(self.nodes) as nodes:
            self.script(replace(drills, nodes=nodes))


Started = dict[Drill, Future[None]]


def drill(nodes: int) -> Callable[[Callable[[Drills], None]], Callable[[Started], None]]:
    """The test that waits for a drill and fails as it failed."""

    def as_test(script: Callable[[Drills], None]) -> Callable[[Started], None]:
        this = Drill(script, nodes)

        def test(started_drills: Started) -> None:
            started_drills[this].result()

        test.__name__, test.__doc__ = script.__name__, script.__doc__
        test.drill = this  # type: ignore[attr-defined]
        return test

    return as_test


@contextmanager
def started(chosen: list[Drill], drills: Drills) -> Iterator[Started]:
    """All of them, `AT_ONCE` at a time. What has not begun at the end never begins."""
    pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="drill")
    try:
        yield {chosen_drill: pool.submit(chosen_drill.run, drills) for chosen_drill in chosen}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
