"""Benchmarks are run by hand: a name that has moved away from under one would be noticed late."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.ranks import ROOT, run_ranks


def import_all(payload: dict[str, Any]) -> None:
    """Import modules by their names, in a process of its own."""
    for name in payload["names"]:
        import_module(name)


@pytest.mark.distributed
def test_every_benchmark_can_be_imported() -> None:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "benchmarks").rglob("*.py"))
    names = sorted(".".join(path.parts) for path in paths)
    assert len(names) > 15
    run_ranks(1, "tests.benchmarks.test_imports:import_all", {"names": names})
