"""Which fast tests run which lines of the modules: a plugin of pytest that traces them, test by test."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.ranks import ROOT
from tools.mutants.places import modules

FAST = "not distributed and not slurm and not gpu and not full"


class Tracer:
    """Notes {test: {module: lines}} and each test's CPU seconds. Set up before our packages are imported."""

    def __init__(self) -> None:
        self._names = {str(ROOT / path): str(path) for path in modules()}
        self.lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self._test = ""

    def install(self) -> None:
        sys.settrace(self._call)
        threading.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = self._names.get(frame.f_code.co_filename)
        if name is None:
            return None
        noted = self.lines[self._test][name]
        noted.add(frame.f_lineno)

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            noted.add(frame.f_lineno)
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._test, began = item.nodeid, time.process_time()
        self.install()  # some libraries take it away
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - began
            self._test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)

    def save(self, path: Path) -> None:
        tests: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for test, by_module in self.lines.items():
            for module, lines in by_module.items():
                for number in sorted(lines):
                    if test not in self.failed:
                        tests[module][str(number)].append(test)
        path.write_text(json.dumps({"tests": tests, "seconds": self.seconds}))


def merge(known: dict[str, Any], new: dict[str, Any], files: set[str]) -> None:
    """Put what the tests of these files touch into what is known, in place of what they touched before."""
    for kept in known["tests"].values():
        for line, tests in [*kept.items()]:
            kept[line] = [test for test in tests if test.partition("::")[0] not in files]
            if not kept[line]:
                del kept[line]
    for module, lines in new["tests"].items():
        for line, tests in lines.items():
            known["tests"].setdefault(module, {}).setdefault(line, []).extend(tests)
    known["seconds"] |= new["seconds"]


def trace(path: Path, files: list[str]) -> None:
    """Run the fast tests of these files in this process and write what they touch."""
    os.chdir(ROOT)
    tracer = Tracer()
    tracer.install()
    pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", FAST, *files], plugins=[tracer]
    )
    sys.settrace(None)
    tracer.save(path)


if __name__ == "__main__":
    trace(Path(sys.argv[1]), sys.argv[2:])
