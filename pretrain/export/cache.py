"""The export of a run that is kept inside its run directory: made once for a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from pretrain.errors import UserError
from pretrain.export.select_checkpoint import CHECKPOINT_FACT, checkpoint_modified, find_checkpoint
from pretrain.export.verb import export_on_cpu
from pretrain.ranks.devices import MACHINE, VISIBLE, cpu_was_asked_for, nvidia_devices
from pretrain.runs.directory import RunDirectory
from pretrain.study.models import FACTS


def exported(path: Path, step: int | None = None) -> Path:
    """A Hugging Face directory: `path` itself if it is one, else the export of the run in `path`.

    Exports whose checkpoints are gone are removed.

    Args:
        step: of a run's checkpoint; None: the newest.

    Raises:
        UserError: `path` is neither, or as `export_run`.
        DataError: as `export_run`.
    """
    run = RunDirectory(path)
    if not run.config.is_file():
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is neither a run directory nor an export: it has no config.yaml")
        if step is not None:
            raise UserError(f"--step {step}: {path} is an export, which is of one step; leave --step out")
        return path
    checkpoint = find_checkpoint(run, step)
    _remove_outdated(run)
    out = run.exports / checkpoint.name
    if not out.is_dir():
        export_on_cpu(path, out, step, None)
    return out


def exported_apart(path: Path, step: int | None = None) -> Path:
    """As `exported`, for a process that wants its GPUs afterwards.

    An export hides the GPUs from its process for good: where there are some, another process makes it.
    """
    is_run = RunDirectory(path).config.is_file()
    if not is_run or not nvidia_devices(MACHINE) or cpu_was_asked_for(os.environ.get(VISIBLE)):
        return exported(path, step)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        return other.submit(exported, path, step).result()


def _remove_outdated(run: RunDirectory) -> None:
    """Remove exports of checkpoints that are gone, or have been written anew."""
    if not run.exports.is_dir():
        return
    live = {path.name: path for path in run.complete_checkpoints()}
    for directory in run.exports.iterdir():
        if directory.name.startswith("."):  # under way, or left by one that was killed
            continue
        checkpoint = live.get(directory.name)
        if checkpoint is None or _made_of(directory) != checkpoint_modified(checkpoint):
            shutil.rmtree(directory)


def _made_of(directory: Path) -> object:
    try:
        return json.loads((directory / FACTS).read_text())[CHECKPOINT_FACT]
    except (OSError, ValueError, KeyError, TypeError):
        return None
