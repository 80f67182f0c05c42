"""Leases: locks that are files with a heartbeat, for file systems without `flock` (NFS, Lustre).

Only one process can create the file (O_EXCL). The holder renews it every few seconds. A lease whose
holder is gone is recognised by its age on the file server's clock, and on the same machine at once,
because the process no longer exists. A process that removes a stale lease first takes a second
lease, named after the inode and time of the stale file, and therefore cannot remove a newer one.

A living process keeps its lease whatever changes around it: it compares the file with what it
wrote, not with the name that its machine has now; the kernel's boot, not that name, says whether
another process can look it up; and since a clock may be set, an old file counts as stale only if it
is not renewed while it is watched.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    NOT_REGULAR,
    naming,
    open_regular,
    read_regular,
    refusing,
    temporary_path,
)

RENEWED_EVERY = 10.0
# Seconds without a renewal after which the holder counts as gone.
EXPIRES_AFTER = 90.0
# Seconds for which a holder's own look at its lease holds.
CONFIRMED_FOR = 1.5 * RENEWED_EVERY
# Seconds for which a holder must be seen not to renew, whatever the age says: a clock may be set.
WATCHED_FOR = 2 * RENEWED_EVERY
# Longest wait, in seconds, for a machine that may be dead.
GONE_AFTER = EXPIRES_AFTER + WATCHED_FOR
# Namespaces that change the number of a process, and the time at which it seems to have started.
_SPACES = ("/proc/self/ns/pid", "/proc/self/ns/time")
_BOOT = "/proc/sys/kernel/random/boot_id"


class BusyError(DataError):
    """Refusal of a lease that another process holds.

    Args:
        message: Sentence that names the holder and the remedy.
        certain: Whether the holder is a living process of this machine.
    """

    def __init__(self, message: str, certain: bool) -> None:
        super().__init__(message)
        self.certain = certain


@dataclass(frozen=True)
class Holder:
    """Process that holds a lease.

    Attributes:
        host: Name of the machine.
        space: Namespaces of the process id and of time, a container's or the host's.
        pid: Process id.
        job: Number of the Slurm job, with the cluster's name if it has one; empty without a job.
        restarts: Number of times the job was requeued before.
        boot: Id of the boot, which tells machines of one name apart.
        started: Ticks from boot to the process's start, which tell processes of one number apart.
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
            space=" ".join(os.readlink(path) for path in _SPACES if os.path.exists(path)),
            pid=os.getpid(),
            job=f"{number} of {cluster}" if number and cluster else number,
            restarts=int(restarts) if restarts.isdigit() else 0,
            boot=_boot(),
            started=_status(os.getpid())[1],
        )

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"

    def is_here(self) -> bool:
        """Return whether the holder is a process that this one can look up, by its number."""
        current = Holder.this()
        return self.boot != "" and (self.space, self.boot) == (current.space, current.boot)

    def is_alive(self) -> bool:
        """Return whether the holder certainly lives, as a process of this machine."""
        if not self.is_here():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # the process exists and belongs to another user
        # A zombie holds nothing, and another start means that the kernel reused the process id.
        state, started = _status(self.pid)
        return state != "Z" and started in ("", self.started)

    def is_gone(self) -> bool:
        """Return whether the holder has certainly ended, here or before a requeue of this job."""
        current = Holder.this()
        if self.job and self.job == current.job and self.restarts < current.restarts:
            return True
        # Two copies of one virtual machine have the same boot, but rarely the same name.
        return self.is_here() and self.host == current.host and not self.is_alive()


_HOLDER = TypeAdapter(Holder)
_LONGEST = 1 << 16
"""Most bytes that are read of a lease; a holder has a few hundred."""


def _holder(content: bytes) -> Holder | None:
    """Parse the holder that a lease names; None if the content is no holder."""
    try:
        return _HOLDER.validate_json(content, strict=True)
    except ValidationError:
        return None


def _boot_seconds() -> float:
    """Return the seconds since boot, those of a sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    """Return the id of the boot; "" if the system does not tell."""
    try:
        return Path(_BOOT).read_text().strip()
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str]:
    """Return a process's state (Z for a zombie) and its start; empty strings if unknown."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return "", ""  # a container sees its host's processes there, by other numbers
        # Field 2, the command in brackets, may itself contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@dataclass(frozen=True)
class _Seen:
    """State of a lease file at one moment; `mark` (inode and time) changes with each renewal."""

    holder: Holder
    gone: bool
    mark: str


class Lease:
    """Context in which this process holds a lease.

    Args:
        what: Work under the lease, for messages: "making x".
        wait_seconds: Seconds to wait for another holder.
    """

    def __init__(self, path: Path, what: str, wait_seconds: float = 0.0) -> None:
        self._path = path
        self._what = what
        self._wait = wait_seconds
        self._content = b""
        self._last_seen = ("", 0.0)
        self._ended = threading.Event()
        self._lost = False
        self._confirmed = 0.0
        self._renewal = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Lease:
        """Create the lease, after removing one whose holder is gone.

        Raises:
            BusyError: If another process holds the lease and does not release it during the wait.
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
                    certain=holder.is_alive(),
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
        """Return whether the lease was removed, as by another process during a suspension.

        Where the last renewal is too long ago, as after a suspension, the file is read here.
        """
        if not self._lost and _boot_seconds() - self._confirmed > CONFIRMED_FOR:
            with contextlib.suppress(OSError):
                self._lost = not self._confirm()
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
        """Create the lease file; return False if one exists.

        Raises:
            OSError: If writing fails; the error names the file, which is removed.
        """
        content = json.dumps(vars(Holder.this())).encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with naming(self._path), os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
        except OSError:
            self._path.unlink()
            raise
        self._content = content
        self._confirmed = _boot_seconds()
        return True

    def _look(self) -> _Seen | None:
        """Read the lease and judge whether its holder is gone; None if there is no lease.

        Raises:
            DataError: If another kind of file has the name, so that no holder can be read.
        """
        try:
            with open_regular(self._path, follow_link=False) as stream:
                status = os.fstat(stream.fileno())
                content = stream.read(_LONGEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.strerror != NOT_REGULAR:
                raise
            raise DataError(
                f"{self._path} is not a regular file, so it is not a lock of {self._what}; remove "
                "it, and run this again"
            ) from None
        # Without a holder, the file was created just now and is not yet written.
        holder = _holder(content) or Holder("an unknown host", "?", 0)
        age = self._server_time() - status.st_mtime
        if age < -RENEWED_EVERY:  # the clock was set back: count from now on
            with contextlib.suppress(OSError):
                os.utime(self._path)
        mark = f"{status.st_ino:x}-{status.st_mtime_ns:x}"
        if mark != self._last_seen[0]:
            self._last_seen = (mark, time.monotonic())
        unchanged_seconds = time.monotonic() - self._last_seen[1]
        expired = age > EXPIRES_AFTER and unchanged_seconds > WATCHED_FOR
        return _Seen(holder, holder.is_gone() or (expired and not holder.is_alive()), mark)

    def _server_time(self) -> float:
        """Return the time by the file server's clock: machines' clocks may differ."""
        probe = temporary_path(self._path)
        try:
            with open(probe, "wb") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _remove_stale(self, stale: _Seen) -> bool:
        """Remove the stale lease if it is unchanged since inspection.

        Return False if another process is removing it.
        """
        removal_path = self._path.with_name(f"{self._path.name}.{stale.mark}")
        try:
            with Lease(removal_path, f"removing {self._path}"):
                seen = self._look()
                if seen is not None and seen.mark == stale.mark:
                    self._path.unlink()
        except BusyError:
            return False
        return True

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_EVERY):
            # A file server that fails now may answer at the next renewal, before the lease expires.
            with contextlib.suppress(OSError):
                if not self._confirm():
                    self._lost = True
                    return
                os.utime(self._path)

    def _confirm(self) -> bool:
        """Return whether the lease is this process's own, and note when it was."""
        now = _boot_seconds()
        if own := self._is_own():
            self._confirmed = now
        return own

    def _is_own(self) -> bool:
        """Return whether the lease is the one that this process wrote; OSError if unreadable."""
        try:
            return read_regular(self._path) == self._content
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold a lease; wait only for a holder on another machine, which may be dead.

    Args:
        what: Work under the lease, for messages.

    Raises:
        BusyError: If a living process of this machine holds the lease, or one of another machine
            keeps renewing it.
        DataError: If the lease cannot be written.
    """
    lease = Lease(path, what)
    with contextlib.ExitStack() as stack:
        with refusing(f"write the lock {path}"):
            holder = lease.holder()
            waits = holder is not None and not holder.is_alive()
            stack.enter_context(Lease(path, what, GONE_AFTER) if waits else lease)
        yield
