"""Sentences about a failed write: the file, the bytes needed, the bytes free, a remedy."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pretrain.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "your quota there is used up: make room, or have it raised",
    errno.EFBIG: "a file may not become so large there: raise the limit (`ulimit -f`), "
    "or use another place",
    errno.EIO: "the storage itself reports an error: have it checked, or use another place",
    errno.EROFS: "it is mounted read-only: have it mounted for writing, or use another place",
    errno.EACCES: "get the permission to write there",
}
ANSWER_SECONDS = 5.0
"""Seconds after which a file system counts as standing."""
OF_THE_STORAGE = frozenset(_REMEDIES) - {errno.EACCES}
"""errno values caused by the file system, not by the path."""


def storage_sentence(error: OSError, target: Path, needed: int = 0) -> str:
    """Return a sentence with a remedy for a failed write.

    Args:
        error: Error of the write.
        target: File or directory to name if the error does not name its file.
        needed: Total bytes to be written there; 0 if unknown.
    """
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else target
    system = _file_system(path)
    room = "how much is free is not known"
    if system is not None:
        room = f"{size_text(system.f_bavail * system.f_frsize)} are free"
    no_more_files = system is not None and system.f_files and not system.f_favail
    if error.errno == errno.ENOSPC and no_more_files:
        room = f"{room}, but it may hold no more files"
    elif needed:
        room = f"about {size_text(needed)} are needed and {room}"
    remedy = _REMEDIES.get(error.errno or 0, "fix that")
    reason = error.strerror or type(error).__name__
    return (
        f"{path} cannot be written ({reason}; {room}); {remedy}, then the same command continues "
        "from the newest complete checkpoint"
    )


def stands(directory: Path, seconds: float = ANSWER_SECONDS) -> bool:
    """Return whether a directory's file system does not finish writing one byte in time.

    Args:
        directory: A directory on the file system.
        seconds: Seconds to wait for an answer.
    """

    def write() -> bool:
        with suppress(OSError), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"\n")
            os.fsync(file.fileno())
        return False

    return answer(write, True, seconds)


def answer(ask: Callable[[], Any], otherwise: Any, seconds: float) -> Any:
    """Return what a call returns that asks a file system; `otherwise` if it fails or is late."""
    answers = [otherwise]

    def answered() -> None:
        with suppress(OSError, UserError):
            answers.insert(0, ask())

    probe = threading.Thread(target=answered, daemon=True)
    probe.start()
    probe.join(seconds)
    return answers[0]


def _file_system(path: Path) -> os.statvfs_result | None:
    """Return the sizes of the file system of `path`; None if unknown."""
    for existing in (path.absolute(), *path.absolute().parents):
        try:
            return os.statvfs(existing)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


def size_text(number: float) -> str:
    """Write bytes in the decimal unit that leaves one to three digits before the point."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
