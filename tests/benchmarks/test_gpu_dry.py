"""Costs of a training step on a GPU, counted without one: within the bounds of `make gpu-dry`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from shutil import which

import pytest

from benchmarks.gpu_dry import selection
from benchmarks.gpu_dry.__main__ import DESIGNS, ROOT
from benchmarks.gpu_dry.layers import BOUNDS
from tests.distributed.designs import DESIGNS as KINDS

QUICK = ("orthogonal", "tp2")
pytestmark = [
    pytest.mark.distributed,
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


@pytest.mark.parametrize(
    ("vocabulary", "pieces", "capability"),
    [(32000, 32000, 80), pytest.param(50304, 50257, 90, marks=pytest.mark.full)],
)
def test_the_compiled_loss_is_three_passes_over_the_logits_in_two_kernels(
    vocabulary: int, pieces: int, capability: int
) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_dry.kernels"]
    command += map(str, (12800, vocabulary, pieces, capability))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    ((summing,), (gradient,)) = map(json.loads, lines)
    assert (summing[:2], gradient[:2]) == ([1, 0], [1, 1])  # [reads, writes]
    assert min(summing[2], gradient[2]) > 1000  # machine code


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_whatever_a_configuration_combines_waits_and_copies_no_more_than_its_stage_does() -> None:
    chosen = selection.chosen()
    assert {design.variant for design in chosen.values()} == {
        own["variant"] for own in KINDS.values()
    }
    command = [sys.executable, "-m", "benchmarks.gpu_dry.selection"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| 0 | 0 |\n") == len(chosen)


@pytest.mark.full
@pytest.mark.parametrize("design", BOUNDS)
def test_the_kernels_of_a_compiled_layer_move_no_more_than_they_did(design: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_dry.layers", design]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    forward, backward, total = map(float, done.stdout.splitlines()[-1].split("|")[3:6])
    assert total == pytest.approx(forward + backward, abs=0.11)
    assert BOUNDS[design] - 0.2 < total  # else lower the bound
