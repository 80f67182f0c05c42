"""Trainings of a sweep, one or several at a time, each by `python -m pretrain train --local-ranks`.

Nothing is kept in memory that matters: what is done is read from the run directories, so a sweep
that was stopped or killed continues when it is started again, and several machines can each run a
slice.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Literal

from laboratory.runs.finished import read_summary
from laboratory.sweep.plan import PlannedRun, standing_of
from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.ranks.cores import usable_cores
from pretrain.ranks.devices import VISIBLE, gpu_names
from pretrain.ranks.environment import without_rank
from pretrain.ranks.launch import prepare_child
from pretrain.ranks.signals import handle_requests
from pretrain.reporting.log_errors import error_lines
from pretrain.runs.directory import FINISHED, RunDirectory
from pretrain.runs.metrics_file import last_record
from pretrain.runs.tags import STEP_SECONDS

POLL_SECONDS = 0.1
SECONDS_BETWEEN_LINES = 60.0
"""Between two reports of what is running."""
SECONDS_BETWEEN_TRIES = 2.0
"""Between two looks at the runs that another sweep is running."""
LAST_BYTES = 1 << 16

Ending = Literal[
    "finished",
    "finished before",
    "finished elsewhere",
    "failed",
    "stopped",
    "busy",
    "not started",
    "running",
]
"""elsewhere: by another sweep, while this one ran. busy: another sweep is running it. stopped: a
signal came, and what was trained is saved. running: no end yet; such an outcome is only reported.
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run in this sweep.

    Attributes:
        ending: Way in which the run ended.
        seconds: Seconds that it took in this sweep.
        detail: Reason why it did not finish.
    """

    run: PlannedRun
    ending: Ending
    seconds: float = 0.0
    detail: str = ""

    @property
    def done(self) -> bool:
        """Return whether the run needs nothing more."""
        return self.ending.startswith("finished")

    def validation(self) -> tuple[float | None, float | None]:
        """Return loss, in nats per token, and perplexity at the run's end; None where not known."""
        run = RunDirectory(self.run.path)
        if not self.done or not run.summary.is_file():
            return None, None
        try:
            values = read_summary(run)["validation"]
        except (UserError, OSError):  # `compare` says what is damaged
            return None, None
        return values["loss"], values["perplexity"]


class SignalRelay:
    """Stop signals, kept until they are passed on.

    After the first, nothing new starts.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._passed_on = 0

    def install(self) -> SignalRelay:
        """Put the handlers in place (main thread only)."""
        handle_requests(self._on_signal)
        return self

    def pass_on(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Send what came since the last call to every process that is still running."""
        new = self.received[self._passed_on :]
        self._passed_on += len(new)
        for number in new:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


@dataclass(frozen=True)
class _Job:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    log: FileIO
    log_start: int
    started: float


def run_sweep(
    runs: Sequence[PlannedRun],
    jobs: int,
    local_ranks: int,
    signals: SignalRelay,
    report: Callable[[PlannedRun, Outcome | None], None],
) -> list[Outcome]:
    """Run the unfinished runs in order; a failure stops no other run.

    A branch (`schedule.branch_from`) starts when its trunk, if that is among the runs, has ended.
    What another sweep is running is left for later, and done where that has finished it.

    Args:
        jobs: Most runs at a time.
        local_ranks: Ranks of each run.
        signals: Those received so far are passed on to the runs.
        report: Called with every run when it starts (with None), once a minute while it runs, when
            it has ended, and once where another sweep is running it.

    Raises:
        UserError: there are too few GPUs for so many runs at a time.
    """
    on_cpu = all(run.config.run.device == "cpu" for run in runs)
    devices = visible_devices() if jobs > 1 and not on_cpu else []
    environments = [_environment(slot, jobs, local_ranks, devices=devices) for slot in range(jobs)]
    outcomes = {
        run.name: Outcome(run, "finished before" if run.standing == "finished" else "not started")
        for run in runs
    }
    waiting = deque(run for run in runs if run.standing != "finished")
    busy: list[PlannedRun] = []
    active: dict[int, _Job] = {}
    reported = tried = time.monotonic()

    def end(outcome: Outcome) -> None:
        outcomes[outcome.run.name] = outcome
        report(outcome.run, outcome)

    while active or ((waiting or busy) and not signals.received):
        if len(active) < jobs and time.monotonic() - tried >= SECONDS_BETWEEN_TRIES:
            tried = time.monotonic()
            waiting.extend(busy)
            busy.clear()
        while len(active) < jobs and not signals.received:
            if (run := next_run(waiting, [*busy, *(job.run for job in active.values())])) is None:
                break
            waiting.remove(run)
            slot = next(slot for slot in range(jobs) if slot not in active)
            started = _start(run, environments[slot], local_ranks)
            if isinstance(started, _Job):
                active[slot] = started
                report(run, None)
                continue
            if started.ending == "busy":
                busy.append(run)
            if started.ending != outcomes[run.name].ending:
                end(started)
        signals.pass_on([job.process for job in active.values()])
        for slot in [slot for slot, job in active.items() if job.process.poll() is not None]:
            end(_outcome(active.pop(slot), signals))
        if time.monotonic() - reported >= SECONDS_BETWEEN_LINES:
            reported = time.monotonic()
            for job in active.values():
                report(
                    job.run, Outcome(job.run, "running", reported - job.started, _progress(job.run))
                )
        time.sleep(POLL_SECONDS)
    late_outcomes = (_on_disk(run) for run in (*waiting, *busy))
    outcomes.update({outcome.run.name: outcome for outcome in late_outcomes if outcome is not None})
    return [outcomes[run.name] for run in runs]


def next_run(waiting: Sequence[PlannedRun], active: Sequence[PlannedRun]) -> PlannedRun | None:
    """Return the first run whose trunk has ended or is not of this sweep.

    Args:
        waiting: Runs that have not started.
        active: Runs that have not ended.

    Returns:
        None while there is no such run.
    """
    to_come = {run.path.resolve() for run in (*waiting, *active)}
    trunks = ((run, run.config.schedule.branch_from) for run in waiting)
    ready = (run for run, trunk in trunks if trunk is None or trunk.resolve() not in to_come)
    # Two runs that name each other as trunk would wait for ever.
    return next(ready, waiting[0] if waiting and not active else None)


def _start(run: PlannedRun, environment: Mapping[str, str], local_ranks: int) -> _Job | Outcome:
    """Start a run, or return its outcome if it is finished, busy or cannot start."""
    try:
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            log = stack.enter_context(run.log.open("ab", buffering=0))
            locked = _lock(log)
            outcome = _on_disk(run)
            if outcome is not None:
                return outcome
            if not locked:
                return Outcome(run, "busy", detail="another sweep is running it")
            job = _launch(run, environment, local_ranks, log=log)
            stack.pop_all()
            return job
    except (OSError, subprocess.SubprocessError) as error:
        return Outcome(run, "failed", detail=f"it cannot be started with its log ({error})")


def _lock(log: FileIO) -> bool:
    """Lock a log while any process of its run lives; return False if another process holds it."""
    try:
        # The ranks inherit the open file, and with it the lock, beyond the end of this sweep.
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _on_disk(run: PlannedRun) -> Outcome | None:
    """Return the outcome of a run that has finished meanwhile or differs from the plan."""
    try:
        if standing_of(run.config) == "finished":
            return Outcome(run, "finished elsewhere")
        if load_config(run.base, run.overrides).values != run.config.values:
            raise UserError(f"{run.base} was edited since this sweep began; start the sweep again")
    except (UserError, OSError) as error:
        return Outcome(run, "failed", detail=str(error))
    return None


def _launch(
    run: PlannedRun, environment: Mapping[str, str], local_ranks: int, *, log: FileIO
) -> _Job:
    start = log.seek(0, os.SEEK_END)
    command = [sys.executable, "-m", "pretrain", "train", run.base, *run.overrides]
    command += ["--local-ranks", str(local_ranks)]
    log.write(
        f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}  python {shlex.join(command[1:])}\n".encode()
    )
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=prepare_child,
    )
    return _Job(run, process, log, log_start=start, started=time.monotonic())


def _outcome(job: _Job, signals: SignalRelay) -> Outcome:
    seconds = time.monotonic() - job.started
    code = job.process.returncode
    try:
        job.log.close()
        state = RunDirectory(job.run.path).state()
        if code == 0 and state == FINISHED:
            return Outcome(job.run, "finished", seconds)
        if code == 0:
            return Outcome(job.run, "stopped", seconds, f"saved, state {state}")
        if any(code in (-number, 128 + number) for number in signals.received):
            why = "before it had trained or saved anything new"
            return Outcome(job.run, "stopped", seconds, why)
        detail = _last_error(job.run.log, job.log_start) or f"exit code {code}"
    except OSError as error:
        detail = f"exit code {code}, and {error}"
    return Outcome(job.run, "failed", seconds, detail)


def _progress(run: PlannedRun) -> str:
    """Return the last recorded step and the time left, by its seconds, in words.

    Records that cannot be read are the run's own affair.
    """
    total = run.config.total_steps
    try:
        record = last_record(RunDirectory(run.path).metrics)
        step, seconds = record["step"], record[STEP_SECONDS.tag] * (total - record["step"])
    except (OSError, UserError, LookupError, TypeError):
        return f"starting, {total} steps to go"
    return f"step {step} of {total}, about {timedelta(seconds=round(seconds))} left"


def _last_error(log: Path, start: int) -> str:
    """Return the last line of an attempt's log that reads like an error, else its last line."""
    with log.open("rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - LAST_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("--- ")]
    return (error_lines(lines) or lines or [""])[-1]


def _environment(
    slot: int, jobs: int, local_ranks: int, *, devices: Sequence[str]
) -> dict[str, str]:
    """Return the environment of one of `jobs` slots: its share of threads, and its own GPUs."""
    environment = without_rank(os.environ)  # else only task 0 of an srun would print its errors
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // (jobs * local_ranks))))
    if devices:
        environment[VISIBLE] = ",".join(devices_of_slot(devices, slot, jobs, local_ranks))
    return environment


def devices_of_slot(
    devices: Sequence[str], slot: int, jobs: int, local_ranks: int
) -> Sequence[str]:
    """Return the GPUs of one slot, one per rank.

    Args:
        devices: All GPUs.
        slot: Number of the slot, from 0.
        jobs: Number of slots.
        local_ranks: Ranks of a run.

    Raises:
        UserError: there are too few.
    """
    if len(devices) < jobs * local_ranks:
        raise UserError(
            f"--jobs {jobs} with --local-ranks {local_ranks} needs {jobs * local_ranks} GPUs and "
            f"there are {len(devices)}; run fewer jobs, or set {VISIBLE}= to train on the CPU"
        )
    return devices[slot * local_ranks : (slot + 1) * local_ranks]


def visible_devices() -> list[str]:
    """Return the GPUs that torch can use in this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    return gpu_names(os.environ.get(VISIBLE), torch.cuda.device_count())
