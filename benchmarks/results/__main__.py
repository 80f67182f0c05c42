"""Makes the pages of docs/results: trains the runs of each, if they are not finished, and writes its reports.

    python -m benchmarks.results [PAGE...] [--quick] [--jobs 2] [--out docs/results] [--list] [--no-training]

Without PAGE all of them. Stopped or failed, the same command goes on from there. --no-training writes the
pages whose runs are all finished, and says what the others wait for. --quick trains two or so runs of a page,
the same as in full, with one seed: it shows that every page can be made, and claims nothing.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from benchmarks.results.figures import settle
from benchmarks.results.pages import PAGES, Page, Report, runs_of
from pretrain.sweep.grid import expand, read_grid

QUICK_OUT = Path("build/results-quick")


@dataclass(frozen=True)
class Step:
    """A command for a page: a sweep, or a report of `runs`, which is written into `out`."""

    page: str
    arguments: tuple[str, ...]
    out: Path | None = None
    report: Report | None = None
    runs: tuple[Path, ...] = ()


def sweeps(pages: Sequence[Page], quick: bool, jobs: int) -> list[Step]:
    """Return the sweeps that train the pages' runs, the longest first; no run is in two of them."""
    groups: dict[tuple[str, str], list[str]] = {}
    taken: set[Path] = set()
    for page in pages:
        for run in runs_of(page, quick):
            if run.path not in taken:
                groups.setdefault((page.name, run.grid), []).append(run.path.name)
            taken.add(run.path)
    steps = []
    for (page_name, grid), names in sorted(groups.items(), key=lambda item: -len(item[1])):
        whole = len(names) == len(expand(read_grid(grid)))
        only = () if whole else tuple(word for name in names for word in ("--only", name))
        steps.append(Step(page_name, ("sweep", grid, "--jobs", str(jobs), *only)))
    return steps


def reports(page: Page, out: Path, quick: bool) -> list[Step]:
    """Return the steps that write the page. With `quick` everything is compared with the first run."""
    runs = runs_of(page, quick)
    steps = []
    for report in page.reports[: 1 if quick else None]:
        place = out / (report.out or page.name)
        chosen = [run.path for run in runs if quick or not report.cells or run.cell in report.cells]
        baseline = runs[0].path.name if quick and runs else report.baseline
        options = ["--baseline", baseline] if report.baseline else []
        options += ["--subject", report.subject] if report.subject else []
        options += report.quick if quick else report.options
        arguments = (*report.verb.split(), *map(str, chosen), *options, "--out", str(place))
        steps.append(Step(page.name, arguments, place, report, tuple(chosen)))
    return steps


class Stopped(Exception):
    """A step failed, or a signal came; `code` is the exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Commands:
    """Runs steps as `python -m pretrain`. Ctrl-C reaches those by itself: they are of the same group."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._running: set[subprocess.Popen[bytes]] = set()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def run(self, steps: Sequence[Step], at_a_time: int = 1) -> None:
        """Run all; after one that failed nothing new is started. Raises Stopped."""
        with ThreadPoolExecutor(at_a_time) as pool:
            waiting = [pool.submit(self._run, step) for step in steps]
            try:
                for step in as_completed(waiting):
                    step.result()
            except Stopped:
                pool.shutdown(cancel_futures=True)
                raise

    def _run(self, step: Step) -> None:
        code = 0
        if not self._received:
            command = [sys.executable, "-m", "pretrain", *step.arguments]
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL if step.out else None
            ) as process:
                self._running.add(process)
            self._running.remove(process)
            code = process.returncode
        if self._received:
            name = signal.Signals(self._received[0]).name
            raise Stopped(
                128 + self._received[0], f"{name} received; the same command goes on from here"
            )
        if code:
            what = shlex.join(step.arguments[:2])
            raise Stopped(
                code if code > 0 else 128 - code, f"page {step.page}: '{what}' ended with {code}"
            )
        if step.out:
            print(f"page {step.page}: {step.out / 'report.md'}", flush=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        for process in tuple(self._running) if number == signal.SIGTERM else ():
            process.send_signal(number)


def make(pages: Sequence[Page], out: Path, quick: bool, jobs: int, training: bool) -> None:
    """Page by page; with `quick` first all trainings, then all reports, `jobs` at a time. Raises Stopped."""
    commands = Commands()
    at_a_time = jobs if quick else 1
    for batch in [pages] if quick else [[page] for page in pages]:
        if training:
            commands.run(sweeps(batch, quick, 1 if quick else jobs), at_a_time)
        written = [step for page in batch for step in reports(page, out, quick)]
        commands.run(written, at_a_time)
        for step in written:
            if step.out and step.report and not quick:
                settle(step.out, step.report, step.runs)


def lacks(page: Page, quick: bool) -> str:
    """Say in a sentence why --no-training leaves the page out; "" if it does not."""
    if not page.runs:
        return f"page {page.name} is left out: its report trains models of its own"
    runs = runs_of(page, quick)
    missing = [str(run.path) for run in runs if not run.finished]
    if not missing:
        return ""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"page {page.name} is left out: {len(missing)} of its {len(runs)} runs are not finished: "
        f"{', '.join(missing[:3])}{more}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Makes the pages of docs/results."
    parser = argparse.ArgumentParser(prog="benchmarks.results", description=description)
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="default: all, in the order of --list"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few runs of one seed: about eleven minutes on two cores",
    )
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, help=f"default: docs/results; with --quick {QUICK_OUT}")
    parser.add_argument("--list", action="store_true", help="only say what is there")
    parser.add_argument(
        "--no-training", action="store_true", help="only pages whose runs are all finished"
    )
    given = parser.parse_args(arguments)
    known = {page.name: page for page in PAGES if page.in_quick or not given.quick}
    for name in given.pages:
        if name not in known:
            quick = " with --quick" if given.quick else ""
            parser.error(f"there is no page '{name}'{quick}; there are {', '.join(known)}")
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}: give 1 or more")
    pages = [page for name, page in known.items() if name in given.pages or not given.pages]
    out = given.out or (QUICK_OUT if given.quick else Path("docs/results"))
    if given.list:
        for page in pages:
            runs = runs_of(page, given.quick)
            done = (
                f"{sum(run.finished for run in runs)} of {len(runs)} runs finished"
                if runs
                else "no runs"
            )
            places = " ".join(str(step.out) for step in reports(page, out, given.quick))
            print(f"{page.name:16} {done:26} {places}")
        return 0
    if given.no_training:
        reasons = {page.name: lacks(page, given.quick) for page in pages}
        for reason in filter(None, reasons.values()):
            print(reason)
        pages = [page for page in pages if not reasons[page.name]]
    started = time.monotonic()
    try:
        make(pages, out, given.quick, given.jobs, training=not given.no_training)
    except Stopped as stop:
        print(f"error: {stop}", file=sys.stderr)
        return stop.code
    print(
        f"{len(pages)} pages in {out} after {timedelta(seconds=round(time.monotonic() - started))}"
    )
    return 0 if pages else 1


if __name__ == "__main__":
    sys.exit(main())
