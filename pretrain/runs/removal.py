"""Removal of checkpoints and files in a run directory.

A trained checkpoint is not deleted because one of its files is lost. A checkpoint without its
marker is removed only if it holds nothing but the leftovers of a killed save; otherwise it is kept
aside.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
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
"""Written after every rank's file, and before the first `.written` is removed."""
_TEMPORARY = re.compile(rf".+-\d+{re.escape(TEMPORARY_SUFFIX)}")


def _is_of_a_killed_save(checkpoint: Path) -> bool:
    """Return whether a directory holds only files that a save has before it is complete."""
    names = {path.name for path in checkpoint.iterdir()}
    parts = {name for name in names if _PART.fullmatch(name)}
    written = {name for name in names if _WRITTEN.fullmatch(name)}
    temporary = {name for name in names if _TEMPORARY.fullmatch(name)}
    if names - parts - written - temporary - {_INDEX}:
        return False
    # Whole parts without any trace of a save are a copy made without its JSON files: kept.
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
    """Remove an unfinished checkpoint or keep it aside; leave one that is complete.

    Only the leftovers of a killed save and weights that gave no finite loss are removed; never a
    checkpoint that is known good or that `latest` names, which only complete ones are.

    Args:
        checkpoint: One of the run's checkpoints.
        begun_here: Whether this process has begun to save the checkpoint, into an empty directory.

    Returns:
        The new path of a checkpoint that is kept aside, else None.
    """
    if (checkpoint / MARKER).exists():
        return None
    foreign = checkpoint.is_symlink() or not checkpoint.is_dir()  # no save creates these
    counted = (checkpoint / GOOD).exists() or run.named_latest() == checkpoint
    withdrawn = (checkpoint / WITHDRAWN).exists()
    if not (foreign or counted) and (begun_here or withdrawn or _is_of_a_killed_save(checkpoint)):
        hidden = _hide(run, checkpoint)
        with suppress(OSError):  # its name is free; what is left goes after the next save
            _remove_directory(hidden)
        return None
    return checkpoint.rename(free_name(checkpoint, INCOMPLETE_SUFFIX))


def make_room(run: RunDirectory, checkpoint: Path) -> None:
    """Free the path at which a checkpoint is to be written."""
    if checkpoint.is_symlink() or checkpoint.exists():
        put_away(run, checkpoint)
    if checkpoint.is_symlink() or checkpoint.exists():  # complete, so another training wrote it
        checkpoint.rename(free_name(checkpoint, INCOMPLETE_SUFFIX))


def remove_oldest(run: RunDirectory, keep_last: int, every: int) -> str | None:
    """Keep the last few complete checkpoints, and the last one that is known good.

    Checkpoints that a signal has saved between two multiples of `every` are removed before those at
    a multiple. So a stopped and resumed run keeps the checkpoints of an uninterrupted one, from
    which other runs branch.

    Args:
        keep_last: Number of checkpoints to keep.
        every: Steps between checkpoints; 0 if only the last step is saved.

    Returns:
        A sentence about a checkpoint that cannot be removed; the next call tries again.
    """
    newest_first = run.complete_checkpoints()
    good = [path for path in newest_first if (path / GOOD).exists()][:1]
    regular = [path for path in newest_first[1:] if every and step_of(path) % every == 0]
    irregular = [path for path in newest_first[1:] if path not in regular]
    outlived = [*newest_first[:1], *regular, *irregular][max(1, keep_last) :]
    left = None
    half_removed = run.half_removed()
    for path in [*half_removed, *(old for old in outlived if old not in good)]:
        hidden = path
        try:
            if path not in half_removed:
                hidden = _hide(run, path)
            _remove_directory(hidden)
        except OSError as error:
            left = f"{hidden} is not needed any more and cannot be removed ({error.strerror})"
    return left


def remove_left_behind(run: RunDirectory) -> None:
    """Remove the temporary files and half-removed checkpoints of killed processes."""
    for path in run.temporary_files():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove_file(path)


def remove_file(path: Path) -> None:
    """Remove a file that can be written again; a missing file is no error."""
    path.unlink(missing_ok=True)


def _hide(run: RunDirectory, checkpoint: Path) -> Path:
    """Rename a checkpoint that is to be removed, so that half of one is never taken for one.

    Its own name is free at once, even where NFS keeps a file until every process has closed it.
    """
    return checkpoint.rename(run.removed(checkpoint))


def _remove_directory(hidden: Path) -> None:
    """Remove what `_hide` has renamed.

    Raises:
        OSError: something in it cannot be removed; all else is gone.
    """
    if hidden.is_symlink():  # the files elsewhere belong to somebody else
        hidden.unlink()
        return
    shutil.rmtree(hidden, ignore_errors=True)  # first all that can be removed; then raise the rest
    with suppress(FileNotFoundError):
        shutil.rmtree(hidden)
