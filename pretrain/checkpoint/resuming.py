"""Where a run starts: at step 0, or at the newest checkpoint, if it is whole and the run's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain.checkpoint.format import About, DamagedCheckpoint
from pretrain.checkpoint.identity import accept_identity
from pretrain.checkpoint.layout import Layout, layout_line
from pretrain.checkpoint.reading import StoredCheckpoint
from pretrain.checkpoint.state import StoredState
from pretrain.checkpoint.verify import verify
from pretrain.config.keys import Change
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext, require_equal_on_all_ranks
from pretrain.runs.directory import RunDirectory
from pretrain.runs.position import Position

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        checkpoint: None: from nothing.
        state: what to put into the model and the engine.
        about: what its checkpoint.json says.
        layout_changes: what is different from the layout that wrote it.
        notes: what the user is to be told, a line each.
    """

    checkpoint: Path | None = None
    state: StoredState | None = None
    about: About | None = None
    layout_changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def position(self) -> Position:
        return self.about.position if self.about is not None else Position()


def find_start(config: Config, context: ParallelContext, identity: dict[str, Any]) -> Start:
    """The newest checkpoint, verified (collective); damaged ones are kept aside if that is asked for.

    Args:
        identity: of this run, as `run_identity` gives it; its bank is not looked at (see `check_bank`).

    Raises:
        UserError: on every rank: ranks see different checkpoints, or the newest one is damaged, of another
            model or of other data.
    """
    newest, notes = _newest_whole(config, context)
    if newest is None:
        return Start(notes=tuple(notes))
    stored = together(lambda: StoredCheckpoint(newest))
    changes = Layout.of(config, context).changes_from(stored.about.layout)
    if changes:
        notes.append(layout_line(changes, config.model.dropout))
    notes += [
        f"changed on resume, as data.allow_change permits: {change}"
        for change in accept_identity(str(newest), stored.about, identity, config.data.allow_change)
    ]
    state = StoredState(stored, context.tensor_parallel_rank, context.tensor_parallel_size)
    return Start(newest, state, stored.about, tuple(changes), tuple(notes))


def _newest_whole(config: Config, context: ParallelContext) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are what was saved, None without any, and what was kept aside."""
    run = RunDirectory(config.run_path)
    by_hash = config.checkpoint.verify == "full"
    share = context.rank, context.world_size
    say = partial(print, flush=True) if context.is_first else lambda line: None
    notes: list[str] = []
    while True:
        together(partial(_check_permissions, run))
        newest = run.newest_checkpoint()
        require_equal_on_all_ranks(
            "the newest complete checkpoint",
            str(newest),
            "make the run directory visible and identical on every node",
        )
        if newest is None:
            return None, notes
        try:
            together(partial(verify, newest, by_hash, share, say))
            return newest, notes
        except DamagedCheckpoint as error:
            if not config.checkpoint.fall_back:
                raise
            notes.append(_keep_aside(run, newest, error, context))


def _check_permissions(run: RunDirectory) -> None:
    """A directory that may not be looked into would pass for one without checkpoints."""
    for path in (run.checkpoints, *run.checkpoints.glob("step_*")):
        if os.access(path, os.F_OK) and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(f"{path} cannot be read and written; mend its permissions")


def _keep_aside(
    run: RunDirectory, checkpoint: Path, error: DamagedCheckpoint, context: ParallelContext
) -> str:
    """Rename a damaged checkpoint so that it is none any more (collective); what to tell the user.

    Raises:
        UserError: on every rank, if there is none before it.
    """
    problem = str(error).partition("; ")[0]
    if len(run.complete_checkpoints()) == 1:
        raise UserError(
            f"{problem}, and there is no checkpoint before it to go on from; restore the file, or choose "
            "another run.name to start afresh"
        )
    aside = _free_name(checkpoint)
    dist.barrier()  # every rank has looked

    def rename() -> None:
        if context.is_first:
            checkpoint.rename(aside)

    together(rename)
    return f"damaged and kept aside as {aside.name}: {problem}"


def _free_name(checkpoint: Path) -> Path:
    """`step_X.damaged`, or with a number behind it where that is taken."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    number = 2
    while aside.exists():
        aside, number = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}"), number + 1
    return aside


def together(action: Callable[[], T]) -> T:
    """Do what every rank does by itself; what one of them cannot, all refuse (collective).

    Raises:
        UserError: on every rank, the first rank's error; an OSError as a sentence.
    """
    failure: Exception | None = None
    try:
        result = action()
    except UserError as error:
        failure = error
    except OSError as error:
        failure = UserError(
            f"{error.filename}: {error.strerror}; make room, or mend its permissions, and start again"
        )
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    first = next((each for each in failures if each is not None), None)
    if first is not None:
        raise first
    return result
