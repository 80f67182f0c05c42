"""Output directories that are either complete or absent.

.OUT.xxxxxxxx/made    renamed to OUT when complete
.OUT.xxxxxxxx/lock    lease of the process that makes it; the next process that makes OUT removes
                      a directory whose lease nobody holds
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.io.lease import BusyError, Lease
from pretrain.errors import UserError


def refuse_existing(out: Path) -> None:
    """Refuse an output directory that exists.

    Raises:
        UserError: the directory exists.
    """
    if os.path.lexists(out):
        raise UserError(f"--out {out} exists already; remove it, or name another directory")


@contextmanager
def made_beside(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out` on success, and removed otherwise.

    Raises:
        UserError: the directory cannot be written, or `out` exists.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(out)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write beside --out {out}: {error.strerror or error}") from error
    try:
        with Lease(temporary / "lock", f"making {out}"):
            directory = temporary / "made"
            directory.mkdir()
            yield directory
            refuse_existing(out)
            directory.rename(out)
    except OSError as error:
        # Another command made the directory after the check above.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            refuse_existing(out)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_left_behind(out: Path) -> None:
    """Remove temporary directories of killed processes, and nothing that may be a user's own."""
    temporary_name = re.compile(rf"\.{re.escape(out.name)}\.[a-z0-9_]{{8}}")
    for temporary in [path for path in out.parent.iterdir() if temporary_name.fullmatch(path.name)]:
        # Only a directory that holds what `made_beside` writes is one of ours.
        names = {path.name for path in temporary.glob("*")}
        if temporary.is_symlink() or not {"lock"} <= names <= {"lock", "made"}:
            continue
        with contextlib.suppress(BusyError), Lease(temporary / "lock", f"making {out}"):
            shutil.rmtree(temporary, ignore_errors=True)
