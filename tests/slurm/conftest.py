"""The Slurm that all drills share, and the drills themselves, which run side by side."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, require_slurm
from tests.slurm.drills import Drills, References, Started, started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts processes of its own."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    require_slurm()
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def drills(cluster: Cluster, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    directory = tmp_path_factory.mktemp("slurm")
    return Drills(cluster, tiny_shards, directory, References(tiny_shards, directory / "runs"))


@pytest.fixture(scope="session")
def started_drills(request: pytest.FixtureRequest, drills: Drills) -> Iterator[Started]:
    """Every drill that this session has selected, started."""
    functions = [getattr(item, "obj", None) for item in request.session.items]
    with started(
        [function.drill for function in functions if hasattr(function, "drill")], drills
    ) as futures:
        yield futures


@pytest.fixture(scope="session")
def shellcheck() -> str:
    path = shutil.which("shellcheck")
    if path is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    return path
