"""Leases: locks that are files with a heartbeat, for file systems without `flock` (NFS, Lustre).

Only one process can create the file (O_EXCL). The holder renews it every few seconds. A lease that
was left by a process or a machine that is gone is recognised by its age, by the file server's own
clock, and on the same machine at once, because the process does not exist any more. Whoever takes
it over holds a lease of its own meanwhile, named after the very file that was judged, and so
removes no other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from data_pipeline.errors import DataError
from data_pipeline.io.files import naming, refusing, temporary_path

RENEWED_EVERY = 10.0
# So long without a renewal, and the holder is taken to be gone.
EXPIRES_AFTER = 90.0
# So long one waits at most for a machine that may be dead.
GONE_AFTER = EXPIRES_AFTER + 2 * RENEWED_EVERY
_MARKS = "/proc/self/ns/pid"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class BusyError(DataError):
    """Refusal of a lease that another process holds.

    Args:
        message: who holds it, and what to do.
        certain: whether it is a living process of this machine.
    """

    def __init__(self, message: str, certain: bool) -> None:
        super().__init__(message)
        self.certain = certain


@dataclass(frozen=True)
class Holder:
    """Process that holds a lease.

    Attributes:
        host: name of its machine.
        space: namespace of its process id, a container's or the host's.
        pid: its process id.
        job: number of its Slurm job, with the cluster's name where it has one; empty without a job.
        restarts: how often the job was requeued before.
        boot: id of the boot, which tells machines of one name apart.
        started: ticks since the boot at its start, which tell processes of one number apart.
    """

    host: str
    space: str
    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    job: str = ""
    restarts: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    boot: str = ""
    started: str = ""

    @classmethod
    def this(cls) -> Holder:
        """Describe this process."""
        number = os.environ.get("SLURM_JOB_ID", "")
        cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        return cls(
            host=socket.gethostname(),
            space=os.readlink(_MARKS) if os.path.exists(_MARKS) else "",
            pid=os.getpid(),
            job=f"{number} of {cluster}" if number and cluster else number,
            restarts=int(restarts) if restarts.isdigit() else 0,
            boot=_BOOT.read_text().strip() if _BOOT.exists() else "",
            started=_status(os.getpid())[1],
        )

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"

    def is_here(self) -> bool:
        """Return whether the holder is a process of this machine."""
        here = Holder.this()
        return (self.host, self.space, self.boot) == (here.host, here.space, here.boot)

    def is_gone(self) -> bool:
        """Return whether the holder has certainly ended: here, or before a requeue of this job."""
        here = Holder.this()
        if self.job and self.job == here.job and self.restarts < here.restarts:
            return True
        if not self.is_here():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        state, started = _status(self.pid)
        return state == "Z" or started not in ("", self.started)


_HOLDER = TypeAdapter(Holder)
_LONGEST = 1 << 16
"""Bytes that are read of a lease; a holder has a few hundred."""


def _holder(content: bytes) -> Holder | None:
    """Return the holder that a lease names; None where the content is no holder."""
    try:
        return _HOLDER.validate_json(content, strict=True)
    except ValidationError:
        return None


def _status(pid: int) -> tuple[str, str]:
    """Return a process's state, Z for a zombie, and its start; empty if they are not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@dataclass(frozen=True)
class _Seen:
    """Lease file at one moment; `mark` (inode and time) is of no other file and later renewal."""

    holder: Holder
    gone: bool
    mark: str


class Lease:
    """Context in which this process holds a lease.

    Args:
        path: the lease's file.
        what: the work, in messages: "making x".
        wait_seconds: how long another holder is waited for.
    """

    def __init__(self, path: Path, what: str, wait_seconds: float = 0.0) -> None:
        self._path = path
        self._what = what
        self._wait = wait_seconds
        self._ended = threading.Event()
        self._lost = False
        self._renewal = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Lease:
        """Create the lease, after removing one whose holder is gone.

        Raises:
            BusyError: another process holds the lease, and has not let go while this one waited.
        """
        deadline = time.monotonic() + self._wait
        pause = 0.01
        while not self._create():
            seen = self._look()
            if seen is None:
                continue  # just let go
            holder = seen.holder
            if seen.gone and self._remove_stale(seen):
                continue
            if time.monotonic() >= deadline and not seen.gone:
                waited = f" after {self._wait:.0f} s of waiting" if self._wait else ""
                raise BusyError(
                    f"{holder} is {self._what}{waited}; leave it to that one, or end it and run "
                    f"this again ({self._path} is its lock)",
                    certain=holder.is_here(),
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        self._renewal.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._renewal.join()
        with contextlib.suppress(OSError):
            if self._is_own():
                self._path.unlink(missing_ok=True)

    @property
    def lost(self) -> bool:
        """Return whether another process has taken over: this one was suspended too long."""
        return self._lost

    def holder(self) -> Holder | None:
        """Return the present holder, if there is one."""
        seen = self._look()
        return seen.holder if seen is not None else None

    def age(self) -> float | None:
        """Return the seconds since the last renewal, by the file server's clock; None if free."""
        try:
            return self._server_time() - os.stat(self._path).st_mtime
        except FileNotFoundError:
            return None

    def _create(self) -> bool:
        """Create the lease; False where there is one.

        Raises:
            OSError: naming the file, of which nothing is left.
        """
        holder = json.dumps(vars(Holder.this())).encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with naming(self._path), os.fdopen(descriptor, "wb") as stream:
                stream.write(holder)
        except OSError:
            self._path.unlink()
            raise
        return True

    def _look(self) -> _Seen | None:
        """Read the lease and judge its holder; None without one.

        Raises:
            DataError: another kind of file is in its place, of which nobody can tell a holder.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._refusal() from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise self._refusal()
            content = os.read(descriptor, _LONGEST)
        finally:
            os.close(descriptor)
        # Not one: created, and not yet written to.
        holder = _holder(content) or Holder("an unknown host", "?", 0)
        age = self._server_time() - status.st_mtime
        if age < -RENEWED_EVERY:  # the clock was set back: count from now on
            with contextlib.suppress(OSError):
                os.utime(self._path)
        gone = holder.is_gone() or age > EXPIRES_AFTER
        return _Seen(holder, gone, f"{status.st_ino:x}-{status.st_mtime_ns:x}")

    def _refusal(self) -> DataError:
        return DataError(
            f"{self._path} is not a regular file, so it is not a lock of {self._what}; remove "
            "it, and run this again"
        )

    def _server_time(self) -> float:
        """Return the time by the file server's clock: machines' clocks may differ."""
        probe = temporary_path(self._path)
        try:
            with open(probe, "wb") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _remove_stale(self, stale: _Seen) -> bool:
        """Remove the file that was judged and no other. False: another process is at it."""
        of_removal = self._path.with_name(f"{self._path.name}.{stale.mark}")
        try:
            with Lease(of_removal, f"removing {self._path}"):
                seen = self._look()
                if seen is not None and seen.mark == stale.mark:
                    self._path.unlink()
        except BusyError:
            return False
        return True

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_EVERY):
            with contextlib.suppress(OSError):
                if not self._is_own():
                    self._lost = True
                    return
                os.utime(self._path)

    def _is_own(self) -> bool:
        """Return whether this process still holds the lease; OSError if that cannot be read."""
        try:
            return _holder(self._path.read_bytes()) == Holder.this()
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold a lease, after waiting only for a holder on another machine, which may be dead.

    Args:
        path: the lease's file.
        what: the work, in messages.

    Raises:
        BusyError: a living process of this machine holds it, or one of another machine that still
            renews it.
        DataError: it cannot be written.
    """
    lease = Lease(path, what)
    with contextlib.ExitStack() as stack:
        with refusing(f"write the lock {path}"):
            holder = lease.holder()
            waits = holder is not None and not holder.is_here()
            stack.enter_context(Lease(path, what, GONE_AFTER) if waits else lease)
        yield
