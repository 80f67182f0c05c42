"""The outcome of a sample in Markdown: the share of killed faults, its interval, the survivors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.changes import Change
from tools.mutants.trials import SURVIVED

UNTOUCHED = "no fast test runs this line"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant, after so many tests."""

    module: Path
    change: Change
    verdict: str
    tests: int

    @property
    def survived(self) -> bool:
        return self.verdict in (SURVIVED, UNTOUCHED)

    def __str__(self) -> str:
        change = self.change
        place = f"{self.module}:{change.line} {change.function}"
        why = f" ({UNTOUCHED})" if self.verdict == UNTOUCHED else ""
        return f"{place}: `{_short(change.before)}` → `{_short(change.after)}`{why}"


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.959964, killed / tried
    middle = (share + z * z / (2 * tried)) / (1 + z * z / tried)
    half = (
        z
        * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
        / (1 + z * z / tried)
    )
    return middle - half, middle + half


def summary(outcomes: Sequence[Outcome], population: int, command: str, commit: str) -> str:
    """The score, and a table by package."""
    rows = {}
    for outcome in outcomes:
        killed, tried = rows.get(key := "/".join(outcome.module.parts[:2]), (0, 0))
        rows[key] = killed + (not outcome.survived), tried + 1
    killed = sum(not outcome.survived for outcome in outcomes)
    low, high = interval(killed, len(outcomes))
    lines = [
        f"`{command}`, commit {commit}: **{killed} of {len(outcomes)}** faults, drawn from {population:,}, "
        f"were found: {killed / len(outcomes):.1%} (95 % interval {low:.1%} to {high:.1%}).",
        "",
        "| package | planted | found |",
        "| --- | ---: | ---: |",
        *(f"| `{key}` | {tried} | {found} |" for key, (found, tried) in sorted(rows.items())),
    ]
    return "\n".join(lines) + "\n"


def survivors(outcomes: Sequence[Outcome]) -> str:
    """A line for each."""
    return "".join(f"* {outcome}\n" for outcome in outcomes if outcome.survived)


def _short(text: str) -> str:
    first, _, more = text.partition("\n")
    return first[:80] + (" …" if more or len(first) > 80 else "")
