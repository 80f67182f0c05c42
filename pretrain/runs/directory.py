"""The run directory: the contract between `train`, verbs that read runs, and users' tools.

    RUN/config.yaml        all settings, resolved
        environment.json   versions, host, device, layout
        data.json          facts about the data
        audit.json         contents of the DeepSpeed engine
        metrics.jsonl      one object per logged step
        tensorboard/       the same for TensorBoard
        checkpoints/       step_00000123/ (counts once it has a COMPLETE marker), latest
        profile/           traces of the steps that telemetry.profile names
        nccl_trace_rank_N  the last collectives of a rank, after a timeout on GPUs
        lock               the process that trains the run; missing if there is none
        state              one word: running, continue, stopped, diverged, finished
        summary.json       the result of a finished run

No other file spells these names.
"""

from __future__ import annotations

import os
import re
from itertools import chain, count
from pathlib import Path

from data_pipeline.io.files import TEMPORARY_SUFFIX, write_text_atomically
from pretrain.errors import UserError

RUNNING = "running"
CONTINUE = "continue"
"""Saved after SIGUSR1 (a time limit or preemption is near), to be continued."""
STOPPED = "stopped"
"""Saved after SIGTERM or Ctrl-C."""
DIVERGED = "diverged"
"""Ended because the numbers are no longer finite."""
FINISHED = "finished"

MARKER = "COMPLETE"
"""File of a complete checkpoint; names every other file and its size."""
GOOD = "PROVEN"
"""File of a checkpoint that is known good, because a loss of its weights was finite."""
WITHDRAWN = "RUINED"
"""Name of MARKER in a withdrawn checkpoint, whose weights gave no finite loss."""
LOCK = "lock"
DAMAGED_SUFFIX, INCOMPLETE_SUFFIX = ".damaged", ".incomplete"
"""Suffixes of checkpoints that are kept aside: with damaged files, and without a MARKER."""
ABOUT = "checkpoint.json"
"""File that describes a checkpoint; written after every rank's file, before MARKER."""
_CHECKPOINT = re.compile(r"step_([0-9]{1,15})")
_HALF_REMOVED = re.compile(r"\.step_[0-9]+(-[0-9]+)?")
_LEFT_BEHIND = re.compile(
    rf".+-[0-9]+{re.escape(TEMPORARY_SUFFIX)}|\.(latest|state)\..+|{_HALF_REMOVED.pattern}"
)
"""Temporary files, named by this version or older ones, and half-removed checkpoints."""
_LONGEST_WORD = 100


class RunDirectory:
    """The paths in a run directory, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.data = path / "data.json"
        self.audit = path / "audit.json"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        # The start of the names of flight recorder files; the rank follows.
        self.collectives = path / "nccl_trace_rank_"
        self.checkpoints = path / "checkpoints"
        # Holds the newest checkpoint's name, for people; the program goes by the markers.
        self.latest = self.checkpoints / "latest"
        self.state_file = path / "state"
        self.summary = path / "summary.json"
        self.exports = path / "exports"  # under the checkpoints' names

    def require_run(self) -> None:
        """Check that the path holds a run.

        Raises:
            UserError: the path holds no run.
        """
        if not self.config.is_file():
            raise UserError(
                f"{self.path} is not a run directory: it has no {self.config.name}; give the "
                "directory of a run"
            )

    def state(self) -> str | None:
        """Return RUNNING, CONTINUE, STOPPED, DIVERGED or FINISHED; None if never started."""
        return _word(self.state_file)

    def write_state(self, state: str) -> None:
        write_text_atomically(self.state_file, state + "\n")

    def is_finished(self) -> bool:
        """Return whether the state is FINISHED and the summary exists.

        Both are needed, because a kill may come between the two writes.
        """
        return self.state() == FINISHED and self.summary.is_file()

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint saved after `step`."""
        return self.checkpoints / f"step_{step:08d}"

    def complete_checkpoints(self) -> list[Path]:
        """Return the checkpoints that have their marker, newest first."""
        marked = [path for path in self._checkpoints() if (path / MARKER).exists()]
        return sorted(marked, key=step_of, reverse=True)

    def find_checkpoint(self, step: int | None) -> Path:
        """Return the complete checkpoint of a step, or the newest one.

        Raises:
            UserError: there is no such checkpoint.
        """
        complete = {step_of(path): path for path in self.complete_checkpoints()}
        if not complete:
            raise UserError(
                f"{self.path} has no complete checkpoint; train the run until it writes one"
            )
        if step is None:
            return complete[max(complete)]
        if step not in complete:
            steps = ", ".join(map(str, sorted(complete)))
            raise UserError(
                f"--step {step}: {self.path} has complete checkpoints of step {steps} only; "
                "choose one of these"
            )
        return complete[step]

    def unfinished_checkpoints(self) -> list[Path]:
        """Return the checkpoints without a marker, whose writing or removal was not finished."""
        marks = (MARKER, WITHDRAWN)
        return sorted(
            p for p in self._checkpoints() if not any((p / mark).exists() for mark in marks)
        )

    def lost_checkpoints(self) -> list[Path]:
        """Return the checkpoints that were complete once, and have lost files since, oldest first.

        A save that is killed right before its last file leaves everything but the marker, and is
        none of these.
        """
        named = self.named_latest()
        return [
            path
            for path in self.unfinished_checkpoints()
            if path == named or ((path / GOOD).exists() and not (path / ABOUT).exists())
        ]

    def withdrawn_checkpoints(self) -> list[Path]:
        """Return the checkpoints whose weights gave no finite loss."""
        return [path for path in self._checkpoints() if (path / WITHDRAWN).exists()]

    def removed(self, checkpoint: Path) -> Path:
        """Return a free name for a checkpoint while its files are being removed."""
        hidden = checkpoint.with_name(f".{checkpoint.name}")
        return free_name(hidden, "-1") if os.path.lexists(hidden) else hidden

    def half_removed(self) -> list[Path]:
        """Return the directories of checkpoints whose removal has begun."""
        return [
            path for path in self.checkpoints.glob(".step_*") if _HALF_REMOVED.fullmatch(path.name)
        ]

    def temporary_files(self) -> list[Path]:
        """Return the leftovers of killed writes and removals, except the locks of other starts."""
        folders = [folder for folder in (self.path, self.checkpoints) if folder.is_dir()]
        paths = chain.from_iterable(folder.iterdir() for folder in folders)
        return [
            path
            for path in paths
            if _LEFT_BEHIND.fullmatch(path.name) and not path.name.startswith(LOCK)
        ]

    def _checkpoints(self) -> list[Path]:
        """Return the directories of checkpoints.

        Raises:
            UserError: one of them, or the directory of all, cannot be read.
        """
        try:
            names = os.listdir(self.checkpoints)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(self.checkpoints, error.strerror or str(error)) from error
        paths = [self.checkpoints / name for name in names if _CHECKPOINT.fullmatch(name)]
        for path in paths:
            readable = os.access(path, os.R_OK | os.X_OK, effective_ids=True)
            # One that another rank has just removed is not readable either.
            if not readable and path.exists():
                raise _unreadable(path, "Permission denied")
        return paths

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint; None without one."""
        return next(iter(self.complete_checkpoints()), None)

    def named_latest(self) -> Path | None:
        """Return the checkpoint that the file `latest` names; None without one."""
        name = _word(self.latest) or ""
        return self.checkpoints / name if _CHECKPOINT.fullmatch(name) else None

    def name_latest(self, newest: Path | None) -> None:
        """Write the newest checkpoint's name into the file `latest`, for people (rank 0).

        A kill between writing a checkpoint's marker and this leaves an older name there, so a
        resume writes the name again.
        """
        if newest is not None:
            write_text_atomically(self.latest, newest.name + "\n")

    def trained_steps(self) -> int:
        """Return the step of the newest complete checkpoint; 0 without one."""
        newest = self.newest_checkpoint()
        return step_of(newest) if newest is not None else 0


def _unreadable(directory: Path, reason: str) -> UserError:
    return UserError(f"{directory} cannot be read ({reason}); fix its permissions")


def _word(file: Path) -> str | None:
    """Return the one word that a file holds; None without the file."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return stream.read(_LONGEST_WORD).decode(errors="replace").strip()


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's directory is named after.

    Raises:
        ValueError: the directory is not named like a checkpoint.
    """
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named like a checkpoint")
    return int(match[1])


def free_name(path: Path, suffix: str) -> Path:
    """Return `path` plus the first of `suffix`, `suffix`-2, `suffix`-3, … that does not exist."""
    suffixes = chain([suffix], (f"{suffix}-{number}" for number in count(2)))
    return next(
        aside
        for ending in suffixes
        if not os.path.lexists(aside := path.with_name(path.name + ending))
    )


def newest_checkpoint_bytes(run_path: Path) -> int | None:
    """Sum the bytes of all files of the run's newest complete checkpoint; None without one."""
    newest = RunDirectory(run_path).newest_checkpoint()
    if newest is None:
        return None
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
