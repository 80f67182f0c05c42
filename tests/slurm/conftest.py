"""One Slurm and one uninterrupted run for all drills."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import train
from tests.slurm.cluster import Cluster, require_slurm
from tests.slurm.drills import Drills, training_overrides


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    require_slurm()
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def drills(cluster: Cluster, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(cluster, tiny_shards, tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="session")
def uninterrupted(drills: Drills) -> Path:
    """The run that every drill's run must equal: 4 ranks, without Slurm. Its directory."""
    done = train(training_overrides(drills.shards, drills.runs, "uninterrupted"), ranks=4)
    assert done.returncode == 0, done.stderr
    return drills.runs / "uninterrupted"


@pytest.fixture(scope="session")
def shellcheck() -> str:
    path = shutil.which("shellcheck")
    if path is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    return path
