"""Benchmarks are run by hand, so a name that has moved away from under one would be noticed late."""

from __future__ import annotations

import subprocess
import sys

from tests.ranks import ROOT, rank_environment


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    code = f"import sys; sys.path.insert(0, 'benchmarks'); [__import__(name) for name in {names}]"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=rank_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
