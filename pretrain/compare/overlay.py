"""A directory for TensorBoard in which the runs of a comparison lie under names that overlay well.

`tensorboard --logdir OUT/tensorboard` shows VARIANT/seed-N, so that a regular expression picks a variant or a
seed. The entries are links to the runs' own event files: nothing is copied, and a run that goes on is seen.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pretrain.compare.comparison import Comparison
from pretrain.runs.directory import RunDirectory


def link_event_files(comparison: Comparison, directory: Path) -> None:
    """Make the links afresh; runs without event files are left out.

    Only links are removed from an older `directory`, and folders that are then empty.
    """
    _remove_links(directory)
    for group in comparison.groups.groups:
        for run in group.runs:
            events = RunDirectory(run.path).tensorboard
            if events.is_dir():
                link = directory / _file_name(group.name) / f"seed-{run.seed}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(events.resolve(), link.parent.resolve()))


def _remove_links(directory: Path) -> None:
    for folder in sorted(directory.glob("*")) if directory.is_dir() else []:
        if folder.is_dir() and not folder.is_symlink():
            for link in folder.iterdir():
                if link.is_symlink():
                    link.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9+=._,%-]+", "_", name)
