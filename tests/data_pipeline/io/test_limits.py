"""A lack of memory or threads is one sentence of every program, with the limit that was set."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.io.limits import limit_sentence
from tests.ranks import ROOT, rank_environment
from tests.tiny import tiny_overrides

BYTES = 300 << 20
"""More than Python takes, and less than torch."""


@pytest.mark.distributed
def test_a_training_with_too_little_memory_is_a_sentence(tiny_shards: Path, tmp_path: Path) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path, "run")
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "train", "demo", *overrides],
        env=rank_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES)),
    )
    (error,) = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and "ulimit -v is 307,200 kB" in error
    assert error.startswith("error: the system gives this process no more memory or threads (")


def test_the_cause_of_an_error_counts() -> None:
    for lack in (
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
        OSError(12, "Cannot allocate memory"),
    ):
        try:
            raise ValueError("a model") from lack
        except ValueError as error:
            assert "no more memory or threads" in (limit_sentence(error) or "")
    assert limit_sentence(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert limit_sentence(OSError(2, "No such file or directory")) is None
