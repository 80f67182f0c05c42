"""Errors for damaged checkpoints, and their remedies."""

from __future__ import annotations

from pathlib import Path

from pretrain.errors import UserError


class DamagedCheckpoint(UserError):
    """Error for a checkpoint with a file that differs from the one that was saved."""


def damaged(file: Path, problem: str) -> DamagedCheckpoint:
    """Return the error for a damaged file, or for a checkpoint that is no longer there.

    Args:
        file: A file in the checkpoint's directory.
        problem: A clause that follows the file's name.
    """
    if not file.parent.is_dir():
        return DamagedCheckpoint(
            f"{file.parent} was removed while it was being read: a training continues and keeps "
            "its last checkpoint.keep_last; start again, which takes the newest",
            passing=True,
        )
    return DamagedCheckpoint(
        f"{file} {problem}; restore it, or take another checkpoint: --step, or for a training "
        f"checkpoint.fall_back=true, which keeps {file.parent.name} aside and continues from the "
        "one before"
    )


def unreadable(file: Path, error: OSError) -> DamagedCheckpoint:
    """Return the error for a file that cannot be read.

    Args:
        file: A file in the checkpoint's directory.
    """
    return damaged(file, f"cannot be read ({error.strerror})")
