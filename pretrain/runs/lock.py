"""The lock of a run directory: one training at a time, by a renewed lease in `RUN/lock`.

The lease (data_pipeline/io/lease.py) needs no flock, so the lock also works on NFS and Lustre. A
thread renews the lease, however long a step takes. The lock does not outlive its job: the lock of a
dead process on this machine, or of an earlier start of the same Slurm job, is void at once, and
that of a process on another machine expires.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from data_pipeline.io.lease import EXPIRES_AFTER, WATCHED_FOR, BusyError, Lease
from pretrain.errors import UserError
from pretrain.runs.directory import LOCK

PAUSE = 1.0


class RunLock:
    """The lock of a run directory; `take` acquires it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path / LOCK
        self._lease = Lease(self._file, f"training {path}")
        self._made: list[Path] = []
        self._oldest = 0.0

    def take(self) -> bool:
        """Take the lock, or return False if a holder on another machine may be gone.

        Call again after PAUSE then. Directories created for the lock are removed with it, if they
        are still empty.

        Raises:
            UserError: another process is training there.
            OSError: the directory cannot be written to.
        """
        self._made += [d for d in (self._path, *self._path.parents) if not d.exists()]
        try:
            self._lease.__enter__()
        except BusyError as error:
            self._forget_directories()
            if error.certain or self._is_renewed():
                raise UserError(self._sentence()) from error
            return False
        except OSError:
            self._forget_directories()
            raise
        return True

    @property
    def waited_for(self) -> str:
        """Return the line about the holder that is waited for, after `take` has returned False."""
        return (
            f"waits for the lock of {self._path}: {self._lease.holder() or 'its holder'} renewed "
            f"it {self._oldest:.0f} s ago; it is free after {EXPIRES_AFTER:.0f} s without a "
            f"renewal, {WATCHED_FOR:.0f} s of them watched"
        )

    @property
    def lost(self) -> str | None:
        """Return a sentence if another process has taken the lock meanwhile, else None."""
        if not self._lease.lost:
            return None
        if not self._path.is_dir():
            return f"{self._path} was moved or removed in training; move it back, and start again"
        return (
            f"{self._sentence()}: this process has lost the lock, as after a suspension of more "
            f"than {EXPIRES_AFTER:.0f} s; it stops without saving"
        )

    def release(self) -> None:
        """Release the lock."""
        self._lease.__exit__(None, None, None)
        self._forget_directories()

    def _is_renewed(self) -> bool:
        """Return whether the holder has renewed the lock since the last call."""
        age = self._lease.age()
        if age is None:
            return False
        renewed = age < self._oldest
        self._oldest = max(self._oldest, age)
        return renewed

    def _sentence(self) -> str:
        holder = self._lease.holder()
        age = self._lease.age()
        if holder is None or age is None:
            return f"another process was training {self._path} a moment ago; start again"
        return (
            f"{holder} is training {self._path} and renewed its lock {max(0.0, age):.0f} s ago; "
            "leave it to that one, end it and start again, or choose another run.name "
            f"({self._file})"
        )

    def _forget_directories(self) -> None:
        for directory in self._made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        self._made.clear()
