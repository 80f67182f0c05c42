"""The checkpoint of a run to export, and the facts by which an export knows it; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.io.files import hash_file
from pretrain.errors import UserError
from pretrain.runs.directory import MARKER, RunDirectory, step_of

CHECKPOINT_FACT = "checkpoint_sha256"
"""Key of export.json with the checkpoint's `checkpoint_digest`, which shows if that was written again."""


def find_checkpoint(run: RunDirectory, step: int | None) -> Path:
    """Return the run's complete checkpoint of a step, or its newest one. Raises UserError: there is none."""
    complete = {step_of(path): path for path in run.complete_checkpoints()}
    if not complete:
        raise UserError(f"{run.path} has no complete checkpoint; train the run until it writes one")
    if step is None:
        return complete[max(complete)]
    if step not in complete:
        there = ", ".join(map(str, sorted(complete)))
        raise UserError(
            f"--step {step}: {run.path} has complete checkpoints of step {there} only; choose one of these"
        )
    return complete[step]


def checkpoint_digest(checkpoint: Path) -> str:
    """Return the SHA-256 of the marker, which has that of every file of the checkpoint."""
    return hash_file(checkpoint / MARKER)
