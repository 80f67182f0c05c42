"""Which fast tests run which lines of some modules, traced by a plugin of pytest.

python -m tools.mutants.tracing OUT MODULES TESTS     # both JSON lists, of paths in the checkout
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.ranks import ROOT

FAST = "not distributed and not slurm and not gpu and not full"


class Tracer:
    """Notes the tests of each line, and each test's CPU seconds.

    It has to be installed before the modules are imported: their own lines run then.

    Args:
        modules: Paths in the checkout.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._names = {str(ROOT / path): path for path in modules}
        self.tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self._test = ""

    def install(self) -> None:
        """Trace this thread and those to come."""
        sys.settrace(self._call)
        threading.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = self._names.get(frame.f_code.co_filename)
        if name is None:
            return None
        lines = self.tests[name]

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            lines[frame.f_lineno].add(self._test)
            return line

        return line(frame, event, argument)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Trace one test."""
        self._test = item.nodeid
        began = time.process_time()
        self.install()  # some libraries take it away
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - began
            self._test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note tests that cannot find a fault."""
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)

    def save(self, path: Path) -> None:
        """Write {"tests": {module: {line: tests}}, "seconds": {test: CPU seconds}}."""
        tests = {
            module: {line: sorted(some - self.failed) for line, some in lines.items()}
            for module, lines in self.tests.items()
        }
        path.write_text(json.dumps({"tests": tests, "seconds": self.seconds}))


if __name__ == "__main__":
    out, of_modules, of_tests = sys.argv[1:]
    tracer = Tracer(json.loads(of_modules))
    tracer.install()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", FAST]
    pytest.main([*options, *json.loads(of_tests)], plugins=[tracer])
    sys.settrace(None)
    tracer.save(Path(out))
