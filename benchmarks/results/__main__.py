"""Makes the pages of docs/results: trains the runs that are not finished, and writes the reports.

    python -m benchmarks.results [PAGE...] [--jobs 2] [--out docs/results] [--list] [--no-training]

Without PAGE all of them. Stopped or failed, the same command continues from there. --no-training
writes the pages whose runs are all finished, and says what the others wait for.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from benchmarks.results.figures import RESULTS, settle
from benchmarks.results.page import Page, Report, runs_of
from benchmarks.results.pages import PAGES
from pretrain.sweep.grid import expand, read_grid


@dataclass(frozen=True)
class Step:
    """A command for a page: a sweep, or a `report` of `runs`, which is written into `out`."""

    page: str
    arguments: tuple[str, ...]
    out: Path | None = None
    report: Report | None = None
    runs: tuple[Path, ...] = ()


def sweeps(page: Page, jobs: int) -> list[Step]:
    """Return the sweeps that train a page's runs, the longest first.

    Args:
        page: The page.
        jobs: Trainings at a time.
    """
    groups: dict[str, list[str]] = {}
    for run in runs_of(page):
        groups.setdefault(run.grid, []).append(run.path.name)
    steps = []
    for grid, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        whole = len(names) == len(expand(read_grid(grid)))
        only = () if whole else tuple(word for name in names for word in ("--only", name))
        steps.append(Step(page.name, ("sweep", grid, "--jobs", str(jobs), *only)))
    return steps


def reports(page: Page, out: Path) -> list[Step]:
    """Return the steps that write a page.

    Args:
        page: The page.
        out: Folder of all pages.
    """
    runs = runs_of(page)
    steps = []
    for report in page.reports:
        place = out / page.name / report.out
        chosen = tuple(run.path for run in runs if not report.cells or run.cell in report.cells)
        options = ["--baseline", report.baseline] if report.baseline else []
        options += ["--subject", report.subject] if report.subject else []
        options += [*report.options, "--out", str(place)]
        arguments = (*report.verb.split(), *map(str, chosen), *options)
        steps.append(Step(page.name, arguments, place, report, runs=chosen))
    return steps


class Stopped(Exception):
    """A step failed, or a signal came; `code` is the exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Commands:
    """Runs steps as `python -m pretrain`, which Ctrl-C reaches by itself: they are of one group."""

    def __init__(self) -> None:
        self._received = 0
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def run(self, step: Step) -> None:
        """Run a step and wait for its end. Raises Stopped."""
        code = 0
        if not self._received:
            command = [sys.executable, "-m", "pretrain", *step.arguments]
            output = subprocess.DEVNULL if step.out else None
            self._process = subprocess.Popen(command, stdout=output)
            code = self._process.wait()
        if self._received:
            name = signal.Signals(self._received).name
            why = f"{name} received; the same command continues from here"
            raise Stopped(128 + self._received, why)
        if code:
            why = f"page {step.page}: '{shlex.join(step.arguments[:2])}' ended with {code}"
            raise Stopped(code if code > 0 else 128 - code, why)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGTERM and self._process:
            self._process.send_signal(number)


def make(pages: Sequence[Page], out: Path, jobs: int, training: bool) -> None:
    """Train the runs of each page and write its reports.

    Args:
        pages: The pages, one after the other.
        out: Folder of all pages.
        jobs: Trainings at a time.
        training: False to write the reports only.

    Raises:
        Stopped: A step failed, or a signal came.
    """
    commands = Commands()
    for page in pages:
        for step in sweeps(page, jobs) if training else []:
            commands.run(step)
        for step in reports(page, out):
            commands.run(step)
            if step.out and step.report:
                settle(step.out, step.report, step.runs)
            print(f"page {step.page}: {step.out}/report.md", flush=True)


def lacks(page: Page) -> str:
    """Say in a sentence why --no-training leaves the page out; "" if it does not."""
    if not page.runs:
        return f"page {page.name} is left out: its report trains models of its own"
    runs = runs_of(page)
    missing = [str(run.path) for run in runs if not run.finished]
    if not missing:
        return ""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"page {page.name} is left out: {len(missing)} of its {len(runs)} runs are not finished: "
        f"{', '.join(missing[:3])}{more}"
    )


def list_pages(pages: Sequence[Page], out: Path) -> None:
    """Print what of each page's runs is finished, and the folders of its reports in `out`.

    Args:
        pages: The pages, a line each.
        out: Folder of all pages.
    """
    for page in pages:
        runs = runs_of(page)
        finished = sum(run.finished for run in runs)
        done = f"{finished} of {len(runs)} runs finished" if runs else "no runs"
        print(f"{page.name:28} {done:26}", *(step.out for step in reports(page, out)))


def chosen_pages(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[Page]:
    """Return the pages of these names, or all; ends the program where there is no such page.

    Args:
        parser: What says that there is no such page.
        names: Names of pages.
    """
    known = {page.name: page for page in PAGES}
    for name in names:
        if name not in known:
            parser.error(f"there is no page '{name}'; there are {', '.join(known)}")
    return [page for page in PAGES if page.name in names or not names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make or list the pages that the arguments name, and return the exit code."""
    description = "Makes the pages of docs/results."
    parser = argparse.ArgumentParser(prog="benchmarks.results", description=description)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="default: all, as --list has them")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    parser.add_argument("--list", action="store_true", help="only say what is there")
    only = "only pages whose runs are all finished"
    parser.add_argument("--no-training", action="store_true", help=only)
    given = parser.parse_args(arguments)
    pages = chosen_pages(parser, given.pages)
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}: give 1 or more")
    if given.list:
        list_pages(pages, given.out)
        return 0
    if given.no_training:
        reasons = {page.name: lacks(page) for page in pages}
        print(*filter(None, reasons.values()), sep="\n")
        pages = [page for page in pages if not reasons[page.name]]
    started = time.monotonic()
    try:
        make(pages, given.out, given.jobs, training=not given.no_training)
    except Stopped as stop:
        print(f"error: {stop}", file=sys.stderr)
        return stop.code
    took = timedelta(seconds=round(time.monotonic() - started))
    print(f"{len(pages)} pages in {given.out} after {took}")
    return 0 if pages else 1


if __name__ == "__main__":
    sys.exit(main())
