"""Host waits and copies of a training step on a GPU, counted without one: `make gpu-dry`."""

from __future__ import annotations

import os
import subprocess
import sys
from shutil import which

import pytest

from benchmarks.gpu_dry.__main__ import DESIGNS, ROOT

QUICK = ("orthogonal", "tp2")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        not which(os.environ.get("CXX", "g++")), reason="the device guard needs a C++ compiler"
    ),
]


@pytest.mark.parametrize(
    "design",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in DESIGNS],
)
def test_a_step_asks_for_no_more_than_it_did(design: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_dry", design]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {design} | {DESIGNS[design].bounds[0]} |" in done.stdout
