"""A start of the real command: its end, its output, and what it left on the machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from pretrain.ranks.launch import prepare_child
from tests.ranks import ROOT, rank_environment
from tools.faults.plan import Layout

MARK = "FAULTS_START"
"""In the environment of every process of a start, so that it is found wherever it has gone."""
LONGEST_START = 600.0
"""Seconds after which a start that has not ended is hung: up to the fault, and again after it."""
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 0.005
BURIAL_SECONDS = 10.0
"""A killed process of many threads is a zombie before the last of them has let go of its ports."""


class Display:
    """A pipe to what shows a start's output, as `tee` is; it may go away before the start ends.

    Args:
        log: File that shows the output.
    """

    def __init__(self, log: Path) -> None:
        self._reader, self.pipe = os.pipe()
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._show, args=(log,), daemon=True)
        self._thread.start()

    def go_away(self) -> None:
        """Read nothing more: whoever writes from now on gets EPIPE."""
        self._gone.set()
        self._thread.join()

    def _show(self, log: Path) -> None:
        with log.open("ab") as file:
            while not self._gone.is_set():
                if select.select([self._reader], [], [], POLL_SECONDS)[0]:
                    if not (text := os.read(self._reader, 1 << 16)):
                        break
                    file.write(text)
        os.close(self._reader)


@dataclass
class Start:
    """A start under way; `ranks` is empty until the launcher has started them."""

    run: Path
    launcher: psutil.Popen
    mark: str
    began: float
    log: Path
    display: Display | None = None
    ports: set[int] = field(default_factory=set)
    waited: float = 0.0

    @property
    def alive(self) -> bool:
        return self.launcher.poll() is None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks in order, with those whose end the launcher has not noticed."""
        with suppress(psutil.Error):
            return sorted(self.launcher.children(), key=lambda child: child.pid)
        return []

    def note_ports(self) -> None:
        """Record the ports at which the processes of this start listen."""
        for process in self.family():
            with suppress(psutil.Error):
                connections = process.net_connections(kind="tcp")
                self.ports |= {
                    connection.laddr.port
                    for connection in connections
                    if connection.status == psutil.CONN_LISTEN
                }

    def family(self) -> list[psutil.Process]:
        """Return every living process of this start."""
        return [process for process in psutil.process_iter() if _has_mark(process, self.mark)]

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the start ends or runs out of time first."""
        last_look = time.monotonic()
        while self.alive and self.waited < LONGEST_START:
            if condition():
                return True
            time.sleep(POLL_SECONDS)
            # A machine that stood still itself has waited for nobody.
            self.waited = self.waited + min(1.0, time.monotonic() - last_look)
            last_look = time.monotonic()
        return False


@dataclass(frozen=True)
class End:
    """The end of a start.

    Attributes:
        code: Exit code of the launcher; negative for a signal.
        hung: Whether the start had not ended after LONGEST_START, and was killed.
        left: Processes, ports and files of shared memory that remained, each in words.
    """

    code: int
    seconds: float
    output: str
    errors: str
    hung: bool
    left: tuple[str, ...]

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]

    @property
    def has_traceback(self) -> bool:
        return "Traceback" in self.errors or "Traceback" in self.output


Disturb: TypeAlias = Callable[[Start], None]


def leave_alone(start: Start) -> None:
    """Disturb nothing."""


def run_start(
    overrides: Sequence[str],
    layout: Layout,
    run: Path,
    log: Path,
    *,
    disturb: Disturb = leave_alone,
    environment: Mapping[str, str] | None = None,
    piped: Sequence[str] = (),
) -> End:
    """Start `python -m pretrain train demo OVERRIDES --local-ranks N`, and wait for its end.

    Args:
        overrides: Overrides of the configuration.
        layout: Layout with the number of ranks.
        run: Directory of the run.
        log: File of the output; the errors go beside it.
        disturb: Function that is called with the start while it runs.
        environment: Variables beside the usual ones.
        piped: Those of stdout and stderr that go through a `Display`, which shows them in `log`.
    """
    command = [sys.executable, "-m", "pretrain", "train", "demo", *overrides]
    command += ["--local-ranks", str(layout.ranks)]
    mark = uuid.uuid4().hex
    shared_before = _shared_files()
    env = rank_environment() | dict(environment or {}) | {MARK: mark}
    errors = log.with_suffix(".errors")
    with log.open("w") as out, errors.open("w") as err:
        display = Display(log) if piped else None
        streams: dict[str, Any] = {"stdout": out, "stderr": err}
        if display is not None:
            streams |= dict.fromkeys(piped, display.pipe)
        launcher = psutil.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            **streams,
            preexec_fn=_prepare,
        )
        if display is not None:
            os.close(display.pipe)
        start = Start(run, launcher, mark, began=time.monotonic(), log=log, display=display)
        try:
            disturb(start)
            start.waited = 0.0  # for the end, however long the way to the fault was
            start.until(lambda: False)
            hung, seconds = start.alive, start.seconds
            left = () if hung else tuple(_left_behind(start, shared_before))
        finally:
            _kill(start)
            if display is not None:
                display.go_away()
    return End(
        code=launcher.wait(10),
        seconds=seconds,
        output=log.read_text(),
        errors=errors.read_text(),
        hung=hung,
        left=left,
    )


def _prepare() -> None:
    """Prepare a child: a campaign that is killed leaves nothing behind; nohup is not inherited."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    prepare_child()


def _left_behind(start: Start, shared_before: set[str]) -> Iterator[str]:
    """Yield what is left after the launcher's end; the kernel gets a moment to reap the ranks."""
    deadline = time.monotonic() + BURIAL_SECONDS
    while True:
        family = start.family()
        ports = start.ports & _listening(start.mark)
        if not (family or ports) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for process in family:
        yield f"process {process.pid}"
    for port in sorted(ports):
        yield f"port {port}"
    new = _shared_files() - shared_before
    for name in sorted(new - (_mapped() if new else set())):
        yield f"{SHARED_MEMORY / name}"


def _kill(start: Start) -> None:
    for process in [*start.family(), start.launcher]:
        with suppress(psutil.Error, ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    start.launcher.wait(30)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def _listening(mark: str) -> set[int]:
    """Return ports at which a process listens, but for other starts': these may have got them."""
    ports = set()
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN:
            owner = connection.pid
            with suppress(psutil.Error, OSError):
                if owner is not None and psutil.Process(owner).environ().get(MARK) != mark:
                    continue
            ports.add(connection.laddr.port)
    return ports


def _shared_files() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _mapped() -> set[str]:
    """Return the shared-memory files that living processes use, of other cases and programs."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            paths = [mapping.path for mapping in process.memory_maps()]
            paths += [file.path for file in process.open_files()]
            used |= {Path(path).name for path in paths if path.startswith(f"{SHARED_MEMORY}/")}
    return used
