"""The faults of a start: signals at a random moment, failing file systems, damaged checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.faults.plan import STEPS, Case, Fault
from tools.faults.starts import Start

SHIM = Path(__file__).parent / "storage_fault.c"
NEVER = -1


@dataclass
class Disturbance:
    """A signal to a start, when its time has come; then what happened.

    Attributes:
        start_seconds: Seconds of an undisturbed start up to its first step.
        step_seconds: Seconds of an undisturbed step.
        first_step: The step that this start makes first.
        happened: Whether the run had not ended before the signal.
        in_save: Whether a checkpoint was being written then.
        seconds_to_sentence: Seconds from the signal to the first sentence on stderr.
    """

    case: Case
    start_seconds: float
    step_seconds: float
    first_step: int
    happened: bool = False
    in_save: bool = False
    seconds_to_sentence: float | None = None

    def __call__(self, start: Start) -> None:
        self._wait_for_moment(start)
        if not start.alive:
            return
        start.note_ports()
        ranks = start.ranks()
        self.happened = self._strike(start, ranks)
        self.in_save = bool(unfinished_checkpoints(start.run))
        if self.happened and self.case.fault is Fault.SUSPEND:
            struck = time.monotonic()
            errors = start.log.with_suffix(".errors")
            if start.until(lambda: "error: " in errors.read_text()):
                self.seconds_to_sentence = time.monotonic() - struck

    def _wait_for_moment(self, start: Start) -> None:
        case = self.case
        if case.in_start:
            moment = case.moment * self.start_seconds
            start.until(lambda: start.seconds > moment)
            return
        step = self.first_step + int(case.moment * (STEPS - self.first_step))
        records = start.run / "metrics.jsonl"
        if start.until(lambda: bool(start.ranks()) and lines_in(records) >= step):
            time.sleep(case.within * self.step_seconds)

    def _strike(self, start: Start, ranks: list[psutil.Process]) -> bool:
        """Send the signal or take the display away; return whether a process got it."""
        case = self.case
        if start.display is not None:
            start.display.go_away()
            return start.alive
        single = ranks[case.rank : case.rank + 1] or [start.launcher]
        family = ranks if case.whole_family and ranks else [start.launcher]
        terminal = [start.launcher, *(ranks if case.whole_family else [])]
        number, targets = {
            Fault.KILL_ONE: (signal.SIGKILL, single),
            Fault.KILL_ALL: (signal.SIGKILL, family),
            Fault.OTHER_LAYOUT: (signal.SIGKILL, family),
            Fault.CLOCK_BACK: (signal.SIGKILL, family),
            Fault.TWO_STARTERS: (signal.SIGKILL, family),
            Fault.SUSPEND: (signal.SIGSTOP, single),
            Fault.TERMINATE: (signal.SIGTERM, [start.launcher]),
            Fault.CONTINUE: (signal.SIGUSR1, [start.launcher]),
            Fault.HANG_UP: (signal.SIGHUP, terminal),
        }[case.fault]
        sent = False
        for process in targets:
            with suppress(psutil.Error, ProcessLookupError):
                process.send_signal(number)
                sent = True
        return sent


def lines_in(path: Path) -> int:
    """Return the number of whole lines of a file that may not exist yet."""
    with suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def unfinished_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints without a marker, except those that a start set aside."""
    checkpoints = (path for path in run.glob("checkpoints/step_*") if "." not in path.name)
    return [path for path in checkpoints if not (path / "COMPLETE").exists()]


def build_shim(directory: Path) -> Path | None:
    """Build the library that makes writing fail; return None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = directory / "storage_fault.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", SHIM, "-o", library, "-ldl"], check=True, timeout=60
    )
    return library


def failing_storage(
    shim: Path, root: Path, *, counter: Path, after: int, error: int
) -> dict[str, str]:
    """Return the environment in which writing below a directory fails.

    Args:
        shim: The library of `build_shim`.
        root: The directory.
        counter: A file that counts the bytes that were written.
        after: The first byte that cannot be written; NEVER: all can.
        error: Number of the error, or STANDS.
    """
    counter.write_bytes(bytes(8))
    return {
        "LD_PRELOAD": str(shim),
        "STORAGE_ROOT": str(root),
        "STORAGE_COUNTER": str(counter),
        "STORAGE_AFTER": str(after),
        "STORAGE_ERROR": str(error),
    }


def bytes_written(counter: Path) -> int:
    """Return the bytes that were written below the root of `failing_storage`."""
    return int.from_bytes(counter.read_bytes(), "little")


STANDS = 0
"""In place of an error number: who writes waits for ever."""
ERRORS = {Fault.DISK_FULL: errno.ENOSPC, Fault.IO_ERROR: errno.EIO, Fault.STORAGE_STANDS: STANDS}


@contextmanager
def small_disk(directory: Path, size: int) -> Iterator[bool]:
    """Mount a small file system at a directory while the context lasts.

    Args:
        directory: Directory, made if missing.
        size: bytes, in whole pages.

    Yields:
        False where this user may not mount one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={max(size, 1)}", "none", str(directory)]
    try:
        mounted = not subprocess.run(command, capture_output=True, timeout=20).returncode
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=20)


def make_room(directory: Path) -> None:
    """Let the file system of `small_disk` grow."""
    subprocess.run(["mount", "-o", "remount,size=1g", str(directory)], check=True, timeout=20)


AHEAD_SECONDS = 3600.0
RECORDS = ("config.yaml", "environment.json")


def set_clock_back(run: Path) -> None:
    """Date the files of a killed run an hour ahead, as if the clock had been set back."""
    for path in [*run.rglob("*"), run]:
        if path.exists() and not path.is_symlink():
            then = path.stat().st_mtime + AHEAD_SECONDS
            os.utime(path, (then, then))


def damage(checkpoint: Path, case: Case) -> Path:
    """Flip a bit of, or cut, one of a checkpoint's files, remove some, or damage the run's records.

    Args:
        checkpoint: Directory of the checkpoint.
        case: Case that says what is damaged, and where.

    Returns:
        The file, or the checkpoint if there are several.
    """
    if case.fault is Fault.MARKER_LOST:
        (checkpoint / "COMPLETE").unlink()
        return checkpoint / "COMPLETE"
    if case.fault is Fault.MARKER_STANDS:
        (checkpoint / "COMPLETE").unlink()
        os.mkfifo(checkpoint / "COMPLETE")
        return checkpoint / "COMPLETE"
    if case.fault is Fault.RECORD_LOST:
        (checkpoint / "PROVEN").touch()
        (checkpoint / "COMPLETE").unlink()
        (checkpoint / "checkpoint.json").unlink()
        if case.whole_family:
            (checkpoint.parent / "latest").unlink()
        return checkpoint
    if case.fault is Fault.SETTINGS_LOST:
        file = checkpoint.parents[1] / RECORDS[int(case.file * len(RECORDS))]
        if case.whole_family:
            file.unlink()
        else:
            os.truncate(file, int(case.offset * file.stat().st_size))
        return file
    files = sorted(path for path in checkpoint.iterdir() if path.stat().st_size)
    file = files[int(case.file * len(files))]
    at = int(case.offset * file.stat().st_size)
    if case.fault is Fault.CUT:
        os.truncate(file, at)
        return file
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << case.bit
    file.write_bytes(content)
    return file
