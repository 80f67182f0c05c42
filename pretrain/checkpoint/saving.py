"""The save of a checkpoint on one rank, by a thread in the background of training.

    saving = Saving(path=path, snapshot=snapshot, ...)    # writes, hashes, makes durable
    saving.let_count(good)                                # from now on it may become complete
    saving.join(seconds)                                  # then: running, error, seconds_write

The thread calls no collective and does not use the engine: it has its own copy of the values to
write. Rank 0's thread also waits for the other ranks' files and then declares the checkpoint
complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from data_pipeline.io.files import write_text_atomically
from pretrain.checkpoint.format import About
from pretrain.checkpoint.writing import (
    Abandoned,
    Snapshot,
    declare_complete,
    join_parts,
    write_snapshot,
)
from pretrain.ranks.idle import AwakeTime
from pretrain.ranks.watch import end_process
from pretrain.runs.directory import GOOD

PATIENCE = 1.5
"""Timeouts without progress after which a rank ends; after one, rank 0 names a late rank."""


class Saving:
    """A save in progress.

    Args:
        path: The checkpoint's directory.
        snapshot: Values that this rank writes.
        about: Content of checkpoint.json; None on every rank but the first, which completes the
            checkpoint.
        world_size: Number of ranks that write.
        timeout: Seconds that rank 0 waits for the other ranks' files once its own is written and
            the checkpoint may count, and in which the file system must accept some bytes.
        is_lost: Whether the directory is another training's, whose checkpoint this one must not
            become.
        when_complete: Called once the checkpoint counts, on the thread of rank 0.

    Attributes:
        error: The error that ended the thread, if any.
        good: Whether the checkpoint is known good; set by the caller, who has to write the mark
            after the thread has ended.
        snapshot: Values that this rank writes.
        seconds_write: Time the thread took to write, hash and make durable this rank's file; 0
            until then.
    """

    def __init__(
        self,
        *,
        path: Path,
        snapshot: Snapshot,
        about: About | None,
        world_size: int,
        timeout: float,
        is_lost: Callable[[], bool],
        when_complete: Callable[[Path], None],
    ) -> None:
        self.path = path
        self.error: Exception | None = None
        self.good = False
        self.seconds_write = 0.0
        self._waited = AwakeTime(timeout)
        self.snapshot = snapshot
        self._about = about
        self._world_size = world_size
        self._timeout = timeout
        self._is_lost = is_lost
        self._when_complete = when_complete
        self._written = threading.Event()
        self._may_count = threading.Event()
        self._abandoned = threading.Event()
        # A daemon thread: a failing process does not wait for it, and a save without its end does
        # not count.
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Return whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def may_count(self) -> bool:
        """Return whether the checkpoint may become complete."""
        return self._may_count.is_set()

    def wait_for_own_part(self) -> None:
        """Wait until this rank's file is on the disk or has failed to be written."""
        while not self._written.wait(self._timeout / 10):
            self.require_progress()

    def require_progress(self) -> None:
        """End this process if the file system has accepted nothing for PATIENCE timeouts.

        Raising an error would hang: its handlers remove files and the lock on the same file system.
        """
        idle = self._waited.look()
        if not self._written.is_set() and idle > PATIENCE * self._timeout:
            end_process(
                f"rank {self.snapshot.rank} waited {idle:.0f} s (parallel.timeout_seconds is "
                f"{self._timeout:g}) for the file system of {self.path}, which takes no byte; "
                "look at it, then the same command continues from the newest checkpoint"
            )

    def let_count(self, good: bool) -> None:
        """Allow the checkpoint to become complete: the metrics up to its step are durable."""
        self.good = good
        self._may_count.set()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most `seconds`."""
        self._thread.join(seconds)

    def abandon(self) -> None:
        """Stop the thread soon, so that the checkpoint does not become complete."""
        self._abandoned.set()
        self._may_count.set()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_snapshot(self.snapshot, self.path, self._abandoned, self._move)
            self.seconds_write = time.perf_counter() - started
            self._written.set()
            if self._about is not None:
                self._complete(self._about)
        except Abandoned:
            pass
        except Exception as error:  # kept for the training's thread, which alone can stop the run
            self.error = error
        finally:
            self._written.set()

    def _move(self) -> None:
        self._waited.seconds = 0.0

    def _complete(self, about: About) -> None:
        # A client of NFS that looks for a file too early may not see it for up to a minute, longer
        # than a preemption may leave. Where training waits for the save, all files exist by now.
        self._may_count.wait()
        if self._abandoned.is_set():
            return
        files = join_parts(
            self.path,
            self._world_size,
            about,
            timeout=self._timeout,
            abandoned=self._abandoned,
        )
        if self._abandoned.is_set() or self._is_lost():
            return
        if self.good:  # before COMPLETE, so that no complete checkpoint lacks its mark
            write_text_atomically(self.path / GOOD, "")
        declare_complete(self.path, files)
        self._when_complete(self.path)
