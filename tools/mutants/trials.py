"""A process that has imported everything but our packages, and is forked for every mutant."""

from __future__ import annotations

import importlib
import importlib.abc
import io
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.ranks import ROOT
from tools.mutants.changes import planted

OURS = (
    "pretrain",
    "megatron_patches",
    "data_pipeline",
    "tests",
    "benchmarks",
    "slurm",
    "ds_configs",
)
KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"
LEAST_SECONDS = 60.0
MOST_MEMORY = 12 << 30
WAITS = 20
"""A child may take so many times the seconds of CPU that it may use: others use the CPU too."""


class Planted(SourceFileLoader):
    """Loads a module with a fault in it."""

    def __init__(self, name: str, path: Path, number: int) -> None:
        super().__init__(name, str(path))
        self._number = number

    def get_code(self, fullname: str) -> CodeType:
        tree = planted(Path(self.path).read_text(), self._number)
        return compile(tree, self.path, "exec")


@dataclass
class Finder(importlib.abc.MetaPathFinder):
    """Finds that module there, and leaves all others to those behind it."""

    name: str
    path: Path
    number: int

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        loader = Planted(name, self.path, self.number)
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


def import_others() -> None:
    """Import what our packages and the fast tests import of others, as a child found it out."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            folders = [
                f"tests/{name}" for name in ("megatron_patches", "pretrain", "data_pipeline")
            ]
            pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", *folders])
        names = [name for name in sys.modules if name.partition(".")[0] not in (*OURS, "__main__")]
        with os.fdopen(writing, "w") as pipe:
            pipe.write("\n".join(names))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        for name in pipe.read().split("\n"):
            try:
                importlib.import_module(name)
            except Exception:  # made at run time by another module
                continue
    os.wait()


def attempt(module: Path, number: int, tests: Sequence[str], seconds: float, log: Path) -> str:
    """Run tests on a module with a fault, in a child; they took `seconds` of CPU without the fault.

    Number 0: no fault. What the tests of several children share is made once, in the directory of `log`.
    """
    limit = LEAST_SECONDS + 10 * seconds
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit),) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY,) * 2)
        _run_tests(module, number, tests, log)
    deadline = time.monotonic() + WAITS * limit
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return {0: SURVIVED, -signal.SIGKILL: TIMED_OUT, -signal.SIGXCPU: TIMED_OUT}.get(
                code, KILLED
            )
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TIMED_OUT
        time.sleep(0.02)


def _run_tests(module: Path, number: int, tests: Sequence[str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 3
    try:
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            if not name.startswith(("tools.mutants", "tests.ranks")) and name != "tests":
                del sys.modules[name]
        if number:
            name = ".".join(module.with_suffix("").parts)
            sys.meta_path.insert(0, Finder(name, ROOT / module, number))
        plugins = [
            word for name in ("cacheprovider", "xdist", "randomly") for word in ("-p", f"no:{name}")
        ]
        options = ["-q", "-x", *plugins, "-m", "", "--timeout", "0"]  # see `attempt`
        os.environ["PYTEST_XDIST_WORKER"] = (
            "a mutant's"  # what tests share is then beside `basetemp`
        )
        options += ["--basetemp", str(log.parent / "run")]
        code = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)
