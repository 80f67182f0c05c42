"""Detection of an idle process, and the file that it waits for.

An idle process neither computes nor reads nor writes. A call into a file system that has stopped
answering does not return and raises no error. If all ranks wait for the same file, no collective
fails either.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.ranks.environment import speaks_for_all

PATIENCE = 2.0
"""Idle timeouts after which a process ends; more than 1, so that collectives time out first."""
_BUSY = 0.02
"""Share of a core below which a process counts as idle; polling threads use less."""
_BYTES_A_SECOND = 4096
"""Bytes read and written per second below which a process counts as idle; renewing a lock needs
some."""


class AwakeTime:
    """The time for which this process has waited; a suspension counts as one look's share.

    Args:
        timeout: Seconds after which the wait ends; a look adds a quarter of it at most.
    """

    def __init__(self, timeout: float) -> None:
        self.seconds = 0.0
        self._longest = timeout / 4
        self._last_look = time.monotonic()

    def look(self) -> float:
        """Return the seconds waited so far; call it several times in the timeout."""
        now = time.monotonic()
        self.seconds += min(now - self._last_look, self._longest)
        self._last_look = now
        return self.seconds


class Idleness:
    """The time for which this process has been idle.

    Attributes:
        seconds: Seconds of idleness at the last look.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spent = time.process_time()
        self._moved = _moved_bytes()

    def look(self, passed: float) -> None:
        """Update `seconds` from the activity in the `passed` seconds since the last look."""
        spent = time.process_time()
        moved = _moved_bytes()
        idle = (
            spent - self._spent < _BUSY * passed and moved - self._moved < _BYTES_A_SECOND * passed
        )
        self.seconds = self.seconds + passed if idle else 0.0
        self._spent = spent
        self._moved = moved


def _moved_bytes() -> int:
    """Return the bytes that this process has read and written so far; 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(
            int(line.partition(":")[2]) for line in lines if "bytes" in line or "char" in line
        )
    except (OSError, ValueError):
        return 0


def file_in_use(thread: int) -> Path | None:
    """Return the path among the local variables of a thread's innermost calls; None without one.

    The search ends at the innermost function outside the standard library, since callers' paths may
    concern other files. A thread inside torch waits for other ranks, not for a file.

    Args:
        thread: Identifier of the thread.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        paths = [value for value in frame.f_locals.values() if isinstance(value, Path)]
        if name == "torch":
            return None
        if paths or name not in sys.stdlib_module_names:
            return paths[0] if paths else None
        frame = frame.f_back
    return None


def waited_for(file: Path | None) -> str:
    """Return a clause about the file that an idle process waits for."""
    if file is None:
        return "it neither computes nor reads nor writes; look at what holds it"
    return f"{file} does not answer; look at its file system"


@contextmanager
def ending_when_idle(task: str, timeout_seconds: float) -> Iterator[None]:
    """End this process if it waits in the block for a file that does not answer.

    Use this before the ranks meet; later `watch.Watch` does the same, and needs torch.

    Args:
        task: Noun phrase for the work in the block, such as "reading the data".
    """
    ended = threading.Event()
    thread = threading.get_ident()
    every = min(10.0, timeout_seconds / 8)

    def look() -> None:
        idle = Idleness()
        while not ended.wait(every):
            idle.look(every)
            if idle.seconds > PATIENCE * timeout_seconds:
                if speaks_for_all():
                    clause = waited_for(file_in_use(thread))
                    print(f"error: {task} took {idle.seconds:.0f} s: {clause}", file=sys.stderr)
                    sys.stderr.flush()
                os._exit(2)

    threading.Thread(target=look, name="idleness", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
