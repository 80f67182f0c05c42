"""The start of a run: step 0, or the newest checkpoint, undamaged and the run's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.checkpoint.branching import branch_points
from pretrain.checkpoint.damage import DamagedCheckpoint
from pretrain.checkpoint.identity import accept_identity, layout_changes, layout_line
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.checkpoint.verify import verify
from pretrain.config.keys import Change
from pretrain.config.resolved import Resolved
from pretrain.errors import UserError
from pretrain.ranks.groups import (
    ParallelContext,
    gathered,
    require_equal_on_all_ranks,
    together,
)
from pretrain.runs.directory import (
    CONTINUE,
    DAMAGED_SUFFIX,
    FINISHED,
    GOOD,
    MARKER,
    STOPPED,
    RunDirectory,
    free_name,
    step_of,
)
from pretrain.runs.metrics_file import file_telling_of_a_save
from pretrain.runs.position import Position


@dataclass(frozen=True)
class Start:
    """The start of a run.

    Attributes:
        stored: the checkpoint to resume from, for this rank; None: start at step 0.
        position: progress of the run that the checkpoint has.
        trunk: the run that the checkpoint belongs to, if this run begins as its branch.
        layout_changes: differences from the layout that wrote the checkpoint.
        data_changes: clauses on differences of the data, which data.allow_change permits.
        notes: lines for the user.
    """

    stored: StoredCheckpoint | None = None
    position: Position = field(default_factory=Position)
    trunk: RunDirectory | None = None
    layout_changes: tuple[Change, ...] = ()
    data_changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_start(resolved: Resolved, context: ParallelContext, identity: dict[str, Any]) -> Start:
    """Find the newest checkpoint, the run's own or its trunk's, and verify it (collective).

    Args:
        identity: this run's `run_identity`; its bank is not compared here (see `check_bank`).

    Raises:
        UserError: on every rank: ranks see different checkpoints, or the newest one is damaged, of
            another model or of other data.
    """
    config = resolved.config
    run = resolved.directory
    fall_back = config.checkpoint.fall_back
    judge = partial(
        verify,
        by_hash=config.checkpoint.verify == "full",
        share=(context.rank, context.world_size),
        say=partial(print, flush=True) if context.is_first else lambda line: None,
    )
    newest, notes = _newest_whole(run, fall_back, context, judge)
    with together():
        notes += _check_not_behind(run, newest, fall_back)
    trunk = resolved.trunk if newest is None else None
    if trunk is not None:
        newest, notes = _newest_of_trunk(resolved, trunk, identity, judge)
    if newest is None:
        return Start(notes=tuple(notes))
    with together():
        stored = StoredCheckpoint(
            newest, context.tensor_parallel_rank, context.tensor_parallel_size
        )
    changes = layout_changes(stored.about.layout, resolved.layout)
    notes += [layout_line(changes, config.model.dropout)] if changes else []
    data_changes = accept_identity(
        str(newest),
        stored.about,
        identity,
        config.data.allow_change,
        branch_step=None if trunk is None else step_of(newest),
    )
    notes += [
        f"changed on resume, as data.allow_change permits: {change}" for change in data_changes
    ]
    return Start(
        stored=stored,
        position=stored.about.position,
        trunk=trunk,
        layout_changes=tuple(changes),
        data_changes=tuple(data_changes),
        notes=tuple(notes),
    )


def _newest_whole(
    run: RunDirectory, fall_back: bool, context: ParallelContext, judge: Callable[[Path], None]
) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint, if any, and a note on each one set aside.

    Args:
        run: the run's directory.
        fall_back: set a damaged one aside and take the one before.
        context: this rank's place in the layout.
        judge: raises for a damaged checkpoint, once every rank has looked at its share of it.
    """
    notes: list[str] = []
    aside: set[Path] = set()
    while True:
        with together():
            _check_permissions(run)
        # A client of NFS may see for a minute what another one has renamed.
        complete = [path for path in run.complete_checkpoints() if path not in aside]
        newest = next(iter(complete), None)
        require_equal_on_all_ranks(
            "the newest complete checkpoint",
            str(newest),
            "make the run directory visible and identical on every node",
        )
        if newest is None:
            return None, notes
        try:
            with together():
                judge(newest)
            return newest, notes
        except DamagedCheckpoint as error:
            if not fall_back:
                raise
            notes.append(_keep_aside(newest, error, context, is_last=len(complete) == 1))
            aside.add(newest)


def _newest_of_trunk(
    resolved: Resolved,
    trunk: RunDirectory,
    identity: dict[str, Any],
    judge: Callable[[Path], None],
) -> tuple[Path, list[str]]:
    """Return the newest undamaged checkpoint for a branch, and a note on each damaged one."""
    with together():
        points = branch_points(resolved, trunk, identity)
    # A trunk that still trains may have saved or removed one between two ranks' looks.
    seen = gathered(points)
    points = [point for point in points if all(point in others for others in seen)]
    if not points:
        raise UserError(
            "the ranks see no complete checkpoint of the trunk in common; make "
            "schedule.branch_from visible and identical on every node, and start again",
            passing=True,
        )
    notes: list[str] = []
    for point in points:
        try:
            with together():
                judge(point)
            break
        except DamagedCheckpoint as error:
            if not resolved.config.checkpoint.fall_back or point == points[-1]:
                raise
            notes.append(f"damaged, and left alone: {str(error).partition('; ')[0]}")
    return point, notes


def _check_permissions(run: RunDirectory) -> None:
    """Refuse a directory without permissions, which would pass for one without checkpoints."""
    for path in (run.checkpoints, *run.checkpoints.glob("step_*")):
        if path.is_dir() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(f"{path} cannot be read and written; fix its permissions")


def _check_not_behind(run: RunDirectory, newest: Path | None, fall_back: bool) -> list[str]:
    """Refuse to go back behind a checkpoint that was complete once: the records since would be cut.

    With `fall_back`, and a checkpoint before it to continue from, that is a note for the user.
    """
    latest = run.named_latest()
    lost = [
        path for path in run.lost_checkpoints() if newest is None or step_of(path) > step_of(newest)
    ]
    ended = run.state() in (CONTINUE, STOPPED, FINISHED)
    withdrawn = bool(run.withdrawn_checkpoints())
    if latest is not None and (newest is None or step_of(latest) > step_of(newest)):
        problem = f"{latest} is not complete any more, though {run.latest} names it; restore it"
    elif lost:
        problem = f"{lost[-1]} has lost files: it has {GOOD}, but no {MARKER}; restore it"
    elif newest is None and (witness := file_telling_of_a_save(run, ended, withdrawn)) is not None:
        problem = f"{run.checkpoints} has no checkpoint, though {witness} tells of one; restore it"
    else:
        return []
    if newest is None:
        raise UserError(f"{problem}, or choose another run.name to start afresh")
    if not fall_back:
        raise UserError(
            f"{problem}, or set checkpoint.fall_back=true to continue from {newest.name}"
        )
    return [problem.partition("; ")[0]]


def _keep_aside(
    checkpoint: Path, error: DamagedCheckpoint, context: ParallelContext, is_last: bool
) -> str:
    """Rename a damaged checkpoint to `step_X.damaged`, or `step_X.damaged-N` (collective).

    Returns a note for the user, or refuses if there is no checkpoint before it.
    """
    problem = str(error).partition("; ")[0]
    with together():
        if is_last:
            raise UserError(
                f"{problem}, and there is no checkpoint before it to continue from; restore the "
                "file, or choose another run.name to start afresh"
            )
        aside = free_name(checkpoint, DAMAGED_SUFFIX)
    with together():  # every rank has looked
        if context.is_first:
            checkpoint.rename(aside)
    return f"damaged and kept aside as {aside.name}: {problem}"
