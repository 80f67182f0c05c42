"""A planted fault fails a test, and no fault does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, rank_environment
from tools.mutants.changes import changes, planted

SOURCE = '''
"""A docstring with 1 number."""
def share(values: list[int]) -> float:
    """Return 1 number."""
    return sum(values) / len(values)
'''


def test_faults_are_in_code_and_not_in_types_or_texts() -> None:
    (change,) = changes(SOURCE)
    assert (change.line, change.function, change.after) == (5, "share", "sum(values) * len(values)")
    names: dict[str, object] = {}
    exec(compile(planted(SOURCE, 1), "toy", "exec"), names)
    assert names["share"]([2, 2]) == 8  # type: ignore[operator]


@pytest.mark.distributed
def test_a_fault_is_found(tmp_path: Path) -> None:
    module = "data_pipeline/shards/proportions.py"
    every = changes((ROOT / module).read_text())
    (case,) = [one.number - 1 for one in every if one.before == "weight / sum(exact)"]
    command = [sys.executable, "-m", "tools.mutants", "--modules", module, "--case", str(case)]
    command += ["--tests", "tests/data_pipeline/shards/test_proportions.py"]
    done = subprocess.run(
        [*command, "--record", str(tmp_path / "record.jsonl")],
        cwd=ROOT,
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "**1 of 1** faults were found" in done.stdout, done.stdout + done.stderr
