"""The sentence for a process that the system gives no more memory or threads."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

_WORDS = (
    "can't start new thread",
    "cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",
    "bad_alloc",
)
"""Words in the errors of Python, torch and the loader of libraries, in lower case."""
_LIMITS = {
    "-v": (resource.RLIMIT_AS, 1024, " kB"),
    "-d": (resource.RLIMIT_DATA, 1024, " kB"),
    "-u": (resource.RLIMIT_NPROC, 1, ""),
}
"""{option of ulimit: limit, its unit in bytes, and the unit's name}"""


def limit_sentence(error: BaseException) -> str | None:
    """Return a sentence if an error, or its cause, is a lack of memory or threads; else None."""
    for cause in _causes(error):
        lacks = isinstance(cause, OSError) and cause.errno in (errno.ENOMEM, errno.EAGAIN)
        text = str(cause).lower()
        if lacks or isinstance(cause, MemoryError) or any(word in text for word in _WORDS):
            reason = " ".join(str(cause).split())[:200] or type(cause).__name__
            return (
                f"the system gives this process no more memory or threads ({reason}); "
                f"{_limits()}free memory, raise the limit, or ask the job for more"
            )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _limits() -> str:
    """Return the limits that the shell has set, as a clause that ends in a colon, or ""."""
    finite = [
        f"ulimit {option} is {soft // unit:,}{name}"
        for option, (number, unit, name) in _LIMITS.items()
        if (soft := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY
    ]
    return f"{', '.join(finite)}: " if finite else ""
