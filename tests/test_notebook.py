"""docs/first_model.ipynb runs, and is committed with what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, rank_environment

nbformat = pytest.importorskip("nbformat")
NOTEBOOK = ROOT / "docs/first_model.ipynb"


def shown(notebook: Any) -> str:
    """What the cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def images(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_the_notebook_is_small_and_has_its_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert images(notebook) == 1 and "frozen, shared" in shown(notebook)
    assert NOTEBOOK.stat().st_size < 200_000


@pytest.mark.full
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient").NotebookClient
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in rank_environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    executed = client(notebook, timeout=550, kernel_name="python3", resources=resources).execute()
    said = shown(executed)
    # Gaps differ with Python's documentation, the text; frozen rows cost something on any.
    assert (
        said.count("nats per byte") == 3
        and said.count("frozen, shared  +0.") == 1
        and images(executed) == 1
    )
