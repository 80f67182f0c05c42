"""Benchmarks are run by hand: a name that has moved away from under one would be noticed late."""

from __future__ import annotations

import sys

import pytest

from tests.ranks import ROOT, run_program


@pytest.mark.distributed
def test_every_benchmark_can_be_imported() -> None:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "benchmarks").rglob("*.py"))
    names = sorted(".".join(path.parts) for path in paths)
    assert len(names) > 15
    code = f"from importlib import import_module; [import_module(name) for name in {names}]"
    command = [sys.executable, "-c", code]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
