"""Output directories that are either complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.errors import UserError


def refuse_existing(out: Path) -> None:
    """Raise UserError if the output directory exists already."""
    if out.exists() or out.is_symlink():
        raise UserError(f"--out {out} exists already; remove it, or name another directory")


@contextmanager
def made_beside(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out` on success, and removed otherwise.

    Raises UserError: the directory cannot be written, or `out` exists.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write beside --out {out}: {error.strerror or error}") from error
    try:
        yield directory
        directory.chmod(0o777 & ~_umask())  # mkdtemp gives others no permissions
        refuse_existing(out)
        directory.rename(out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another command has made it a moment ago
            refuse_existing(out)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
