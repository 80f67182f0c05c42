"""Removal of what is in a run directory: one function judges, and all is removed through here.

What somebody has trained for is not deleted because one of its files is lost. Without its marker a
checkpoint is removed only if it holds nothing but what a killed save leaves; else it is kept aside.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from enum import Enum
from pathlib import Path

from safetensors import SafetensorError, safe_open

from data_pipeline.io.files import TEMPORARY_SUFFIX
from pretrain.runs.directory import (
    GOOD,
    INCOMPLETE_SUFFIX,
    MARKER,
    WITHDRAWN,
    RunDirectory,
    free_name,
    step_of,
)

_PART = re.compile(r"rank_\d+\.safetensors")
_WRITTEN = re.compile(r"rank_\d+\.written")
_INDEX = "parameters.json"
"""Written once every rank's file is, and before the first `.written` goes."""
_TEMPORARY = re.compile(rf".+-\d+{re.escape(TEMPORARY_SUFFIX)}")


class Fate(Enum):
    """What becomes of a checkpoint's directory whose place is needed, or that does not count."""

    STAYS = "it counts"
    ASIDE = "it is kept under another name"
    GOES = "it is removed"


def fate(run: RunDirectory, checkpoint: Path, begun_here: bool = False) -> Fate:
    """Judge what may become of a checkpoint that is not simply too old.

    Args:
        run: the run's directory.
        checkpoint: one of its checkpoints.
        begun_here: this process has begun to save it, into a directory that was empty.

    Returns:
        GOES only for what a killed save has left, and for weights that gave no finite loss. Never
        for a checkpoint that is known good, or that `latest` names, as only complete ones are.
    """
    if (checkpoint / MARKER).exists():
        return Fate.STAYS
    if checkpoint.is_symlink() or not checkpoint.is_dir():  # no save has made it
        return Fate.ASIDE
    if (checkpoint / GOOD).exists() or run.named_latest() == checkpoint:
        return Fate.ASIDE
    withdrawn = (checkpoint / WITHDRAWN).exists()
    return Fate.GOES if begun_here or withdrawn or _is_of_a_killed_save(checkpoint) else Fate.ASIDE


def _is_of_a_killed_save(checkpoint: Path) -> bool:
    """Return whether a directory holds only what a save has there before it is complete."""
    names = {path.name for path in checkpoint.iterdir()}
    parts = {name for name in names if _PART.fullmatch(name)}
    written = {name for name in names if _WRITTEN.fullmatch(name)}
    temporary = {name for name in names if _TEMPORARY.fullmatch(name)}
    if names - parts - written - temporary - {_INDEX}:
        return False
    # A copy that has left out all JSON files has whole parts, and nothing that tells of a save.
    return bool(written) or not (
        _INDEX in names or (parts and all(_is_whole(checkpoint / part) for part in parts))
    )


def _is_whole(part: Path) -> bool:
    """Return whether a file has all the bytes that its header names."""
    try:
        with safe_open(str(part), framework="numpy"):
            return True
    except (OSError, SafetensorError):
        return False


def put_away(run: RunDirectory, checkpoint: Path, begun_here: bool = False) -> Path | None:
    """Remove an unfinished checkpoint, or keep it aside; one that counts stays.

    Args:
        run: the run's directory.
        checkpoint: one of its checkpoints.
        begun_here: as in `fate`.

    Returns:
        The new name of one that is kept aside, else None.
    """
    judged = fate(run, checkpoint, begun_here)
    if judged is Fate.GOES:
        _remove_directory(run, checkpoint)
    if judged is not Fate.ASIDE:
        return None
    return checkpoint.rename(free_name(checkpoint, INCOMPLETE_SUFFIX))


def make_room(run: RunDirectory, checkpoint: Path) -> None:
    """Clear the place of a checkpoint that is to be written.

    Args:
        run: the run's directory.
        checkpoint: the place.
    """
    if checkpoint.is_symlink() or checkpoint.exists():
        put_away(run, checkpoint)
    if checkpoint.is_symlink() or checkpoint.exists():  # complete: somebody else's
        checkpoint.rename(free_name(checkpoint, INCOMPLETE_SUFFIX))


def remove_oldest(run: RunDirectory, keep_last: int, every: int) -> str | None:
    """Keep the last few complete checkpoints, and the last one that is known good.

    One that a signal has saved between two multiples of `every` goes before those at a multiple, so
    that a stopped and resumed run has the checkpoints of an uninterrupted one: runs branch there.

    Args:
        run: the run's directory.
        keep_last: how many.
        every: steps between checkpoints; 0 if only the last is saved.

    Returns:
        A sentence about one that cannot be removed, which the next call tries again.
    """
    newest_first = run.complete_checkpoints()
    good = [path for path in newest_first if (path / GOOD).exists()][:1]
    regular = [path for path in newest_first[1:] if every and step_of(path) % every == 0]
    others = [path for path in newest_first[1:] if path not in regular]
    outlived = [*newest_first[:1], *regular, *others][max(1, keep_last) :]
    left = None
    for old in [*run.half_removed(), *outlived]:
        try:
            if old not in good:
                _remove_directory(run, old)
        except OSError as error:
            there = old if old.exists() else run.removed(old)
            left = f"{there} is not needed any more and cannot be removed ({error.strerror})"
    return left


def remove_left_behind(run: RunDirectory) -> None:
    """Remove the temporary files and half-removed checkpoints of killed processes."""
    for path in run.temporary_files():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove_file(path)


def remove_file(path: Path) -> None:
    """Remove a file that is made again, or follows from others; a missing one is no error."""
    path.unlink(missing_ok=True)


def _remove_directory(run: RunDirectory, checkpoint: Path) -> None:
    """Remove a checkpoint.

    First its name goes, so that a half-removed directory is never taken for a checkpoint.
    """
    gone = run.removed(checkpoint)
    if checkpoint != gone:
        shutil.rmtree(gone, ignore_errors=True)  # of a removal that was not finished
        checkpoint.rename(gone)
    if gone.is_symlink():  # what is elsewhere is somebody else's
        gone.unlink()
        return
    shutil.rmtree(gone, ignore_errors=True)  # all that can be removed
    with suppress(FileNotFoundError):
        shutil.rmtree(gone)
