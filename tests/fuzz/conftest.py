"""How many examples.

Few and always the same, or as many as ORA_FUZZ_EXAMPLES says, of --hypothesis-seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is of the extra dev")
FEW = 25
WANTED = os.environ.get("ORA_FUZZ_EXAMPLES")
SETTINGS = {
    "deadline": 60_000,  # milliseconds an example: what takes longer hangs
    "database": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "print_blob": True,
    "report_multiple_bugs": False,
    "phases": [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
}
hypothesis.settings.register_profile("few", max_examples=FEW, derandomize=True, **SETTINGS)
hypothesis.settings.register_profile("many", max_examples=int(WANTED or FEW), **SETTINGS)
hypothesis.settings.load_profile("many" if WANTED else "few")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that all examples of a file of tests share."""
    return tmp_path_factory.mktemp("fuzz")
