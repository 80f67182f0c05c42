"""Fixtures shared by the suite: shards of real text, made once by the real pipeline."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_program
from tests.tiny import VOCAB_SIZE

DRILLS = "tests/slurm/"
WORKSHOP = "tests/data_pipeline/shards/test_blend.py"
FIRST = (DRILLS, "tests/distributed/", WORKSHOP, "tests/megatron_patches/", "tests/data_pipeline/")
"""Drills wait for Slurm most of the time; the rest runs beside them, nothing long at the end.

One file makes the corpus and shards that all of data_pipeline shares; what needs neither runs
meanwhile.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Freeze what the tests import, so that the garbage collector does not look at it again.

    Torch's compiler, a second, is not imported with megatron-core: no test compiles in this
    process.
    """
    gc.disable()
    # Not in the process that only hands out tests.
    if not session.config.pluginmanager.hasplugin("dsession"):
        from megatron_patches.engine.compat import prepare_imports

        prepare_imports()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which `pytest -n 2` hands out the tests."""
    items.sort(key=lambda item: [not item.nodeid.startswith(part) for part in FIRST])


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `pytest -n 2` a file stays with one process, for its fixtures; so do the drills."""
    from xdist.scheduler import LoadScopeScheduling

    class FilesAndDrills(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return DRILLS if nodeid.startswith(DRILLS) else nodeid.partition("::")[0]

    return FilesAndDrills(config, log)


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo corpus, Python's own prose in 8 files, shared as `tiny_shards` are."""
    with shared_directory(tmp_path_factory, "prose") as (directory, complete):
        if not complete:
            data_pipeline("demo-corpus", directory / "corpus")
    return directory / "corpus"


@pytest.fixture(scope="session")
def tiny_shards(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a shard directory of the Python installation's own prose under a 512-piece tokenizer.

    The processes of pytest-xdist share one: the first to ask makes the shards, the others wait for
    them.
    """
    with shared_directory(tmp_path_factory, "tiny") as (directory, complete):
        if not complete:
            (directory / "corpus").symlink_to(prose)
            make_shards(directory)
    return directory / "shards"


@contextmanager
def shared_directory(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Lock a directory that all processes of pytest share, and say whether its content is made.

    The content counts as made once the first `with` block has ended without an exception.
    """
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    directory.mkdir(exist_ok=True)
    marker = directory / "made"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory, marker.exists()
        marker.touch()


def make_shards(directory: Path, model_type: str = "bpe", vocab_size: int = VOCAB_SIZE) -> Path:
    """Tokenizer and shards of `directory`/corpus, beside it."""
    size = ("--vocab-size", vocab_size, "--model-type", model_type)
    data_pipeline("train-tokenizer", directory / "corpus", "--out", directory / "tokenizer", *size)
    shards = ("--out", directory / "shards", "--name", "tiny")
    tokenizer = ("--tokenizer", directory / "tokenizer.model")
    data_pipeline("tokenize", directory / "corpus", *tokenizer, *shards)
    return directory / "shards"


def data_pipeline(*arguments: object) -> None:
    """Run `python -m data_pipeline ARGUMENTS`."""
    command = [sys.executable, "-m", "data_pipeline", *map(str, arguments)]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
