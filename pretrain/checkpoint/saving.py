"""One save of one rank, on a thread behind the training.

    saving = Saving(path, snapshot, about, world_size, timeout)    # writes, hashes, makes durable
    saving.let_count(proven)                                       # from now on it may become complete
    saving.join(seconds)                                           # then: running, error, seconds_write

The thread uses no collective and nothing of the engine: it has its own copy of all that it writes. Rank 0's
also waits for what the other ranks write and then declares the checkpoint complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.checkpoint.format import About
from pretrain.checkpoint.writing import (
    Abandoned,
    Snapshot,
    declare_complete,
    join_parts,
    write_snapshot,
)
from pretrain.runs.directory import PROVEN, write_text_atomically


class Saving:
    """A save under way.

    Args:
        about: what checkpoint.json says; None on every rank but the first, which completes the checkpoint.
        when_complete: called once it counts, on the thread of rank 0.
        timeout: seconds that rank 0 waits for the other ranks' parts once its own is written.

    Attributes:
        seconds_write: of the thread: writing, hashing and making durable this rank's part; 0 until then.
        error: what went wrong; None while nothing has.
    """

    def __init__(
        self,
        path: Path,
        snapshot: Snapshot,
        about: About | None,
        world_size: int,
        timeout: float,
        when_complete: Callable[[Path], None],
    ) -> None:
        self.path = path
        self.error: Exception | None = None
        self.seconds_write = 0.0
        self._snapshot = snapshot
        self._about = about
        self._world_size, self._timeout = world_size, timeout
        self._when_complete = when_complete
        self._proven = False
        self._written, self._may_count, self._abandoned = (threading.Event() for _ in range(3))
        # A daemon: a process that fails does not wait for it, and what it leaves behind does not count.
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Of this rank's part."""
        return self._snapshot.values.nbytes

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def proven(self) -> bool:
        return self._proven

    @property
    def may_count(self) -> bool:
        return self._may_count.is_set()

    def wait_for_own_part(self) -> None:
        """Until this rank's part is on the disk, or could not be brought there."""
        self._written.wait()

    def let_count(self, proven: bool) -> None:
        """The records up to this step are durable: it may become complete, known good or not yet."""
        self._proven = proven
        self._may_count.set()

    def prove(self) -> None:
        """It is known good. A thread that has ended has not seen this: whoever sees it end asks `proven`."""
        self._proven = True

    def join(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        self._thread.join(seconds)

    def abandon(self) -> None:
        """It is to count no more; its thread ends soon."""
        self._abandoned.set()
        self._may_count.set()

    def finish(self, seconds: float) -> None:
        """Let it come to its end if it may, so long at most."""
        if self.may_count:
            self.join(seconds)
        self.abandon()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_snapshot(self._snapshot, self.path, self._abandoned)
            self.seconds_write = time.perf_counter() - started
            self._written.set()
            if self._about is not None:
                self._complete(self._about)
        except Abandoned:
            pass
        except Exception as error:  # for the training's thread, which alone can stop the run
            self.error = error
        finally:
            self._written.set()

    def _complete(self, about: About) -> None:
        files = join_parts(self.path, self._world_size, about, self._timeout, self._abandoned)
        self._may_count.wait()
        if self._abandoned.is_set():
            return
        if self._proven:  # first, so that one that counts and is known good is never without the mark
            write_text_atomically(self.path / PROVEN, "")
        declare_complete(self.path, files)
        self._when_complete(self.path)
