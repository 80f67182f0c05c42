"""The tables of docs/results, as they are committed."""

from __future__ import annotations

import csv
from pathlib import Path

RESULTS = Path("docs/results")


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
