"""A case: a run from nothing or from a checkpoint, its fault, the next start, and the verdict."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tools.faults.inflict import (
    ERRORS,
    Disturbance,
    bytes_written,
    damage,
    failing_storage,
    make_room,
    set_clock_back,
    small_disk,
)
from tools.faults.judge import differences
from tools.faults.plan import (
    DAMAGE,
    STEPS,
    STORAGE,
    SUSPENDED_SECONDS,
    WAITING,
    Case,
    Fault,
    Layout,
    overrides_for,
)
from tools.faults.references import PAGE, Half, Reference, References, size_on_disk
from tools.faults.starts import End, leave_alone, run_start

LONGEST_SENTENCE = 1.5 * SUSPENDED_SECONDS + 3.0
"""Seconds within which a suspended rank must be named.

The timeout, then one look at the others' signs, on a busy machine.
"""
WORDS = {
    Fault.DISK_FULL: "No space left on device",
    Fault.IO_ERROR: "Input/output error",
    Fault.STORAGE_STANDS: "takes no byte",
}
ORDERS = {
    Fault.TERMINATE: signal.SIGTERM,
    Fault.CONTINUE: signal.SIGUSR1,
    Fault.HANG_UP: signal.SIGHUP,
}
"""Signals after which a run is to be saved."""


@dataclass
class Outcome:
    """The result of a case.

    Attributes:
        happened: Whether the fault came before the run had ended.
        in_save: Whether the fault came while a checkpoint was being written.
        sentence: The one sentence with which the disturbed start ended, if it did.
        waited: Seconds from a SIGSTOP to that sentence.
        wrong_end, left, different: what is wrong, in words; empty where nothing is.
        commit: Commit that was tried, for outcomes of several days.
    """

    case: Case
    happened: bool = False
    in_save: bool = False
    sentence: str = ""
    waited: float | None = None
    wrong_end: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0
    commit: str = ""

    @property
    def problems(self) -> list[str]:
        return [*self.wrong_end, *self.left, *self.different]


class Cases:
    """Runs cases in directories of their own below `directory`."""

    def __init__(
        self, directory: Path, shards: Path, shim: Path | None, references: References
    ) -> None:
        self._directory = directory
        self._shards = shards
        self._shim = shim
        self._references = references

    def run(self, case: Case) -> Outcome:
        """Run a case from the fault to the verdict; errors in here count as the case's."""
        began = time.monotonic()
        outcome = Outcome(case)
        directory = self._directory / case.name
        directory.mkdir(parents=True)
        with ExitStack() as stack:
            try:
                self._run(outcome, directory, stack)
            except Exception as error:  # of this program: a campaign goes on, and says so
                outcome.wrong_end.append(f"the case itself failed: {type(error).__name__}: {error}")
        outcome.seconds = time.monotonic() - began
        return outcome

    def _run(self, outcome: Outcome, directory: Path, stack: ExitStack) -> None:
        case = outcome.case
        reference = self._references.of(case.layout)
        runs = directory / "runs"
        half = self._references.half_of(case.layout) if case.resumed else None
        size = _disk_size(case, reference, half)
        on_disk = case.fault is Fault.DISK_FULL and stack.enter_context(small_disk(runs, size))
        runs.mkdir(exist_ok=True)
        if half is not None:
            shutil.copytree(half.run, runs / "run")
        if case.fault in DAMAGE:
            end = self._damaged(outcome, directory)
        elif case.fault in STORAGE:
            share_left = 1.0 if half is None else 1 - half.step / STEPS
            after = int(case.offset * reference.bytes_written * share_left)
            end = self._without_room(outcome, directory, after, on_disk=on_disk)
        else:
            first = half.step + 1 if half is not None else 1
            disturb = Disturbance(case, reference.start_seconds, reference.step_seconds, first)
            end = self._disturbed(outcome, directory, disturb)
        outcome.left += [f"left by the first start: {item}" for item in end.left]
        if end.hung:
            outcome.wrong_end.append(f"hung: had not ended after {end.seconds:.0f} s")
        if case.fault is Fault.CLOCK_BACK:
            set_clock_back(runs / "run")
        if case.fault is Fault.TWO_STARTERS:
            self._both_go_on(outcome, directory, reference)
        else:
            self._go_on(outcome, directory, reference)

    def _disturbed(self, outcome: Outcome, directory: Path, disturb: Disturbance) -> End:
        case = outcome.case
        piped: tuple[str, ...] = ()
        if case.fault is Fault.DISPLAY_GONE:
            piped = ("stdout", "stderr") if case.whole_family else ("stdout",)
        log = directory / "disturbed.log"
        end = self._start(case.layout, log, _timeout(case), disturb, piped=piped)
        outcome.happened, outcome.in_save = disturb.happened, disturb.in_save
        outcome.waited = disturb.seconds_to_sentence
        if case.fault is Fault.SUSPEND:
            if outcome.happened and end.code != 0:
                _expect_sentence(outcome, end, f"rank {case.rank}")
            if outcome.waited is not None and outcome.waited > LONGEST_SENTENCE:
                outcome.wrong_end.append(f"the rank was named after {outcome.waited:.1f} s only")
        elif case.fault is Fault.KILL_ONE:
            if len(end.sentences) > 1 or end.has_traceback:
                also = ", and a traceback" if end.has_traceback else ""
                outcome.wrong_end.append(f"{len(end.sentences)} sentences{also}: {_last_line(end)}")
        elif case.fault is Fault.DISPLAY_GONE:
            if not end.hung and (end.code != 0 or end.has_traceback):
                outcome.wrong_end.append(f"exit code {end.code}: {_last_line(end)}")
        elif case.fault in ORDERS:
            _expect_order(outcome, end, directory / "runs/run")
        return end

    def _without_room(self, outcome: Outcome, directory: Path, after: int, *, on_disk: bool) -> End:
        case = outcome.case
        runs = directory / "runs"
        environment, counter = {}, directory / "written"
        if not on_disk:
            if self._shim is None:
                outcome.wrong_end.append("not tried: there is no C compiler")
                return End(code=0, seconds=0.0, output="", errors="", hung=False, left=())
            environment = failing_storage(
                self._shim, runs, counter=counter, after=after, error=ERRORS[case.fault]
            )
        log = directory / "disturbed.log"
        end = self._start(case.layout, log, _timeout(case), environment=environment)
        outcome.happened = end.code != 0 or (not on_disk and bytes_written(counter) > after)
        if outcome.happened:
            _expect_sentence(outcome, end, WORDS[case.fault], str(runs))
        if on_disk:
            make_room(runs)
        return end

    def _damaged(self, outcome: Outcome, directory: Path) -> End:
        case = outcome.case
        newest = max((directory / "runs/run/checkpoints").glob("step_????????"))
        marker = newest / "COMPLETE"
        content = marker.read_bytes()
        file = damage(newest, case)
        lost = case.fault is Fault.SETTINGS_LOST and not file.exists()
        outcome.happened = True
        end = self._start(case.layout, directory / "disturbed.log", _timeout(case))
        if end.code != 0:  # some bytes mean nothing: white space in JSON
            whole = case.fault in (Fault.SETTINGS_LOST, Fault.MARKER_STANDS)
            _expect_sentence(outcome, end, str(file) if whole else newest.name)
        elif case.fault in (Fault.MARKER_STANDS, Fault.RECORD_LOST):
            outcome.wrong_end.append("was not noticed")
        elif lost and f"{file} is missing" not in end.output:
            outcome.wrong_end.append(f"nothing is said of {file.name}")
        if case.fault is Fault.MARKER_STANDS:
            marker.unlink()
            marker.write_bytes(content)
        return end

    def _go_on(self, outcome: Outcome, directory: Path, reference: Reference) -> None:
        """Run the same command again, and require the result of the undisturbed run."""
        case = outcome.case
        more = ["checkpoint.fall_back=true"] if case.fault in DAMAGE else []
        end = self._start(case.then, directory / "resumed.log", more)
        outcome.left += [f"left by the next start: {item}" for item in end.left]
        if end.hung or end.code != 0:
            how = "hung" if end.hung else f"exit code {end.code}: {_last_line(end)}"
            outcome.different.append(f"does not go on ({how})")
            return
        run = directory / "runs/run"
        outcome.different += differences(run, reference.run, case.then == case.layout)

    def _both_go_on(self, outcome: Outcome, directory: Path, reference: Reference) -> None:
        """Start the run twice at once: one must finish it, the other must refuse."""
        run = directory / "runs/run"
        with ThreadPoolExecutor(2) as pool:
            logs = [directory / f"resumed-{number}.log" for number in (1, 2)]
            ends = list(pool.map(lambda log: self._start(outcome.case.then, log), logs))
        codes = sorted(end.code for end in ends)
        if codes != [0, 2]:
            outcome.different.append(f"two starts ended with exit codes {codes}, not 0 and 2")
        for end in ends:
            if end.code == 2:
                _expect_sentence(outcome, end, str(run))
        if 0 in codes:
            outcome.different += differences(run, reference.run, same_layout=True)

    def _start(
        self,
        layout: Layout,
        log: Path,
        more: Sequence[str] = (),
        disturb: Disturbance | None = None,
        environment: Mapping[str, str] | None = None,
        piped: Sequence[str] = (),
    ) -> End:
        """Start the run beside `log`, with overrides of this case."""
        runs = log.with_name("runs")
        return run_start(
            [*overrides_for(layout, self._shards, runs), *more],
            layout,
            runs / "run",
            log,
            disturb=disturb or leave_alone,
            environment=environment,
            piped=piped,
        )


def _timeout(case: Case) -> list[str]:
    """Return the override of a short timeout, for faults that are told after it."""
    return [f"parallel.timeout_seconds={SUSPENDED_SECONDS}"] if case.fault in WAITING else []


def _disk_size(case: Case, reference: Reference, half: Half | None) -> int:
    """Return the bytes of the disk: the run's files and a share of the space it still needs."""
    has = size_on_disk(half.run) if half is not None else 0
    needs = size_on_disk(reference.run) + size_on_disk(reference.run / "checkpoints") // 4
    return has + PAGE + int(case.offset * max(0, needs - has))


def _expect_sentence(outcome: Outcome, end: End, *fragments: str) -> None:
    """Require exit code 2 and a single sentence that holds all `fragments`."""
    if end.hung:
        return
    sentences = end.sentences
    if end.code != 2:
        outcome.wrong_end.append(f"exit code {end.code}, not 2: {_last_line(end)}")
    if len(sentences) != 1 or end.has_traceback:
        also = ", and a traceback" if end.has_traceback else ""
        outcome.wrong_end.append(f"{len(sentences)} sentences{also}, not 1: {_last_line(end)}")
        return
    outcome.sentence = sentences[0]
    missing = [
        fragment
        for fragment in fragments
        if not re.search(rf"{re.escape(fragment)}\b", sentences[0])
    ]
    if missing:
        outcome.wrong_end.append(f"the sentence does not say {missing[0]!r}: {sentences[0]}")


def _expect_order(outcome: Outcome, end: End, run: Path) -> None:
    """Require a saved run and exit code 0, or death by a signal before its handler was set."""
    if end.hung:
        return
    number = ORDERS[outcome.case.fault]
    state = run / "state"
    saved = state.is_file() and state.read_text() != "running\n"
    by_signal = end.code in (-number, 128 + number) and outcome.case.in_start
    if not by_signal and (end.code != 0 or not saved):
        outcome.wrong_end.append(f"exit code {end.code}: {_last_line(end)}")
    if end.has_traceback:
        outcome.wrong_end.append("a traceback")


def _last_line(end: End) -> str:
    lines = [line for line in (end.errors or end.output).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing was said"
