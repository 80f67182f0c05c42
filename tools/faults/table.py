"""The outcome of a campaign in Markdown, and its record."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from textwrap import wrap
from typing import Any

from tests.ranks import ROOT
from tools.faults.cases import Outcome
from tools.faults.plan import Fault, draw

BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
HEADS = ("fault", "tried", "came in time", "in a start", "in a save", "as undisturbed")


def markdown(outcomes: Sequence[Outcome], command: str, seconds: float) -> str:
    """Return the table by fault, what stands above it, and a line for each problem.

    Args:
        outcomes: Outcomes of all cases.
        command: Command that ran the cases.
        seconds: Seconds that the cases took.
    """
    good = sum(not outcome.problems for outcome in outcomes)
    commits = sorted({outcome.commit for outcome in outcomes if outcome.commit})
    rows = [_row(fault.value, [o for o in outcomes if o.case.fault is fault]) for fault in Fault]
    heading = (
        f"`{command}`, commits {', '.join(commits) or commit()}, "
        f"{platform.system()} {platform.machine()}, {seconds / 60:.0f} minutes: "
        f"**{good} of {len(outcomes)}** ended as if nothing had happened."
    )
    lines = [
        *wrap(heading, 100, break_long_words=False, break_on_hyphens=False),
        "",
        f"| {' | '.join(HEADS)} |",
        f"| --- |{' ---: |' * (len(HEADS) - 1)}",
        *[row for row in rows if row],
        _row("all", list(outcomes)),
    ]
    waited = [outcome.waited for outcome in outcomes if outcome.waited is not None]
    if waited:
        lines += ["", f"A suspended rank was named after {min(waited):.1f} to {max(waited):.1f} s."]
    bad = [outcome for outcome in outcomes if outcome.problems]
    if bad:
        lines += ["", "Not as it should be:", ""]
    for outcome in bad:
        case = outcome.case
        problems = "; ".join(outcome.problems)
        lines.append(
            f"* seed {case.seed}, case {case.number}, {case.fault.value}, {case.layout}: {problems}"
        )
    return "\n".join(lines) + "\n"


def _row(name: str, outcomes: list[Outcome]) -> str:
    if not outcomes:
        return ""
    numbers = (
        len(outcomes),
        sum(outcome.happened for outcome in outcomes),
        sum(outcome.happened and outcome.case.in_start for outcome in outcomes),
        sum(outcome.in_save for outcome in outcomes),
        sum(not outcome.problems for outcome in outcomes),
    )
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def as_record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a record line; seed and number stand for the case."""
    return asdict(outcome) | {"case": outcome.case.number, "seed": outcome.case.seed}


def recorded(path: Path) -> list[Outcome]:
    """Return the outcomes of a record, and remove a torn last line of a killed campaign."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    path.write_text("".join(line + "\n" for line in lines))
    entries = [json.loads(line) for line in lines]
    by_case = {(entry["seed"], entry["case"]): entry for entry in entries}
    names = [field.name for field in fields(Outcome) if field.name != "case"]
    return [
        Outcome(draw(*case), **{name: by_case[case][name] for name in names})
        for case in sorted(by_case)
    ]


def put_into(page: Path, text: str) -> None:
    """Replace the text between the two marks of a page.

    Args:
        page: Page in Markdown.

    Raises:
        ValueError: the page lacks the marks.
    """
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks {BEGIN} or {END}")
    page.write_text(f"{head}{BEGIN}\n{text}{END}{tail}")


def commit() -> str:
    """Return the commit under test."""

    def git(arguments: str) -> str:
        command = ["git", *arguments.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    changed = git("status --porcelain --untracked-files=no -- pretrain data_pipeline")
    return f"{git('rev-parse --short HEAD') or 'unknown'}{' with changes' if changed else ''}"
