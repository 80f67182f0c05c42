"""The run directory: the contract between `train`, every verb that reads runs back, and users' own tools.

    RUN/config.yaml        everything that was set, resolved
        environment.json   versions, host, device, layout
        data.json          what the data is
        audit.json         what DeepSpeed holds
        metrics.jsonl      one object per logged step
        tensorboard/       the same for TensorBoard
        checkpoints/       step_00000123/ (it counts once it has a COMPLETE marker), latest
        profile/           traces of the steps that telemetry.profile names
        nccl_trace_rank_N  the last collectives of a rank, where one has timed out on GPUs
        lock               who trains it now; gone when nobody does
        state              one word: running, continue, stopped, diverged, finished
        summary.json       the result, of a finished run

All these names are written here and nowhere else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.io.files import replace_file

RUNNING = "running"
CONTINUE = "continue"
"""Saved after SIGUSR1 (a time limit or preemption is near), and there is more to do."""
STOPPED = "stopped"
"""Saved after SIGTERM or Ctrl-C, and nobody asked for more."""
DIVERGED = "diverged"
"""Ended because the numbers are no longer finite."""
FINISHED = "finished"

MARKER = "COMPLETE"
"""In a checkpoint's directory: all of it is there. It names every file and its size."""
GOOD = "PROVEN"
"""In a checkpoint's directory: the checkpoint is known good, because a loss of its weights was finite."""
WITHDRAWN = "RUINED"
"""In place of MARKER: the checkpoint was withdrawn, because its weights gave no finite loss."""
_CHECKPOINT = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class RunDirectory:
    """The places in the run directory `path`; nothing has to be there yet."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def audit(self) -> Path:
        return self.path / "audit.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def collectives(self) -> Path:
        """Return the prefix of every rank's flight recorder file; the rank follows."""
        return self.path / "nccl_trace_rank_"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def latest(self) -> Path:
        """Return the file with the name of the newest checkpoint, for people; the markers decide."""
        return self.checkpoints / "latest"

    @property
    def state_file(self) -> Path:
        return self.path / "state"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def exports(self) -> Path:
        """Return the directory of exports, under the checkpoints' names."""
        return self.path / "exports"

    def state(self) -> str | None:
        """Read RUNNING, CONTINUE, STOPPED, DIVERGED or FINISHED; None for a run that never started."""
        return self.state_file.read_text().strip() if self.state_file.is_file() else None

    def write_state(self, state: str) -> None:
        write_text_atomically(self.state_file, state + "\n")

    def is_finished(self) -> bool:
        """Return whether the state says so and the result is there: a kill may fall between the two."""
        return self.state() == FINISHED and self.summary.is_file()

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint saved after `step`."""
        return self.checkpoints / f"step_{step:08d}"

    def complete_checkpoints(self) -> list[Path]:
        """Return the checkpoints that have their marker, newest first."""
        marked = [marker.parent for marker in self.checkpoints.glob(f"*/{MARKER}")]
        return sorted(
            (path for path in marked if _CHECKPOINT.fullmatch(path.name)), key=step_of, reverse=True
        )

    def unfinished_checkpoints(self) -> list[Path]:
        """Return the checkpoints without a marker: their writing, or removal, was not finished."""
        steps = [path for path in self.checkpoints.glob("step_*") if _CHECKPOINT.fullmatch(path.name)]
        marks = (MARKER, WITHDRAWN)
        return sorted(path for path in steps if not any((path / mark).exists() for mark in marks))

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint; None where there is none."""
        return next(iter(self.complete_checkpoints()), None)

    def trained_steps(self) -> int:
        """Return the step of the newest complete checkpoint, from which a restart goes on; 0 without one."""
        newest = self.newest_checkpoint()
        return step_of(newest) if newest is not None else 0


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's directory is named after. Raises ValueError for any other name."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named like a checkpoint")
    return int(match[1])


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either the old content or all of the new, whatever happens.

    Raises:
        OSError: naming `path`; nothing of the new content is left.
    """
    replace_file(path, text.encode(), durable=False)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically."""
    write_text_atomically(path, json.dumps(content, indent=1) + "\n")
