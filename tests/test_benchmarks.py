"""Benchmarks are run by hand, so a name that has moved away from under one would be noticed late."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from tests.ranks import ROOT, rank_environment

# A row of tokenize.py, run as a process of its own only where its package is installed.
OPTIONAL = {"datasets_map": "datasets"}


def test_every_benchmark_can_be_imported() -> None:
    absent = {name for name, package in OPTIONAL.items() if importlib.util.find_spec(package) is None}
    names = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - absent)
    code = f"import sys; sys.path.insert(0, 'benchmarks'); [__import__(name) for name in {names}]"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=rank_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
