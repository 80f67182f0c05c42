"""A process that has imported everything but our packages, and is forked for every mutant."""

from __future__ import annotations

import importlib
import importlib.abc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
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
    "tools",
    "benchmarks",
    "slurm",
    "ds_configs",
)
KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"
LEAST_SECONDS = 60.0
MOST_MEMORY = 12 << 30
WAITS = 20
"""A child may take so many times the seconds of CPU that it may use: others use the CPU too."""
COLLECT = """import json, pathlib, pytest, sys
pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", *sys.argv[2:]])
pathlib.Path(sys.argv[1]).write_text(json.dumps([*sys.modules]))
"""


class Planted(SourceFileLoader):
    """Loads a module with a fault in it.

    Args:
        name: Of the module.
        path: Its file.
        number: Of the fault.
    """

    def __init__(self, name: str, path: Path, number: int) -> None:
        super().__init__(name, str(path))
        self._number = number

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module."""
        return compile(planted(Path(self.path).read_text(), self._number), self.path, "exec")


@dataclass
class Finder(importlib.abc.MetaPathFinder):
    """Finds the module with the fault, and leaves all others to the finders behind it."""

    name: str
    path: Path
    number: int

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, as the base class says.

        Args:
            name: Its full name.
            path: Of its package.
            target: A module that is loaded again.
        """
        if name != self.name:
            return None
        loader = Planted(name, self.path, self.number)
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


def import_others(tests: Sequence[str], found: Path) -> None:
    """Import what our packages and some tests import of others.

    Args:
        tests: Files and folders.
        found: A file to be written with the names of all modules.
    """
    subprocess.run([sys.executable, "-c", COLLECT, found, *tests], cwd=ROOT, capture_output=True)
    for name in json.loads(found.read_text()):
        if name.partition(".")[0] not in (*OURS, "__main__"):
            with suppress(Exception):  # some are made at run time by another module
                importlib.import_module(name)


def attempt(module: Path, number: int, tests: Sequence[str], seconds: float, log: Path) -> str:
    """Run tests on a module with a fault, in a child process.

    Args:
        module: Path in the checkout.
        number: Of the fault; 0: none.
        tests: Their ids.
        seconds: CPU seconds that they take without the fault.
        log: What the tests print. What several children's tests share is made once, in its
            directory.

    Returns:
        KILLED, SURVIVED or TIMED_OUT.
    """
    limit = LEAST_SECONDS + 10 * seconds
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        _run_tests(module, number, tests, log)
    deadline = time.monotonic() + WAITS * limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ended = os.waitstatus_to_exitcode(status)
            if ended in (-signal.SIGKILL, -signal.SIGXCPU):
                return TIMED_OUT
            return KILLED if ended else SURVIVED
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT


def _run_tests(module: Path, number: int, tests: Sequence[str], log: Path) -> None:
    """Run the tests and end this process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 3
    try:
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            # This program itself is in use, and has to have no second form.
            if not name.startswith(("tools", "tests.ranks")) and name != "tests":
                del sys.modules[name]
        if number:
            name = ".".join(module.with_suffix("").parts)
            sys.meta_path.insert(0, Finder(name, ROOT / module, number))
        without = [f"-pno:{name}" for name in ("cacheprovider", "xdist", "randomly")]
        options = ["-q", "-x", *without, "-m", "", "--timeout", "0"]  # see `attempt`
        # What tests share is then beside `basetemp`.
        os.environ["PYTEST_XDIST_WORKER"] = "a mutant's"
        code = int(pytest.main([*options, "--basetemp", str(log.parent / "run"), *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)
