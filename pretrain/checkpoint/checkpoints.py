"""The checkpoints of a run: saving them in the background of training, and keeping the last few.

A checkpoint counts only once it has the marker COMPLETE, which names every file with its size and
SHA-256. A checkpoint is known good once a loss of its weights was finite: the next step's, or a
validation's.

At most one save is in progress. Finishing a save takes no collective: every rank watches its own
thread (`saving`), and rank 0's thread writes the marker. Where all ranks must know the outcome,
they call `wait`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_pipeline.io.files import write_text_atomically
from pretrain.checkpoint.deferred_error import DeferredError
from pretrain.checkpoint.format import About
from pretrain.checkpoint.saving import Saving
from pretrain.checkpoint.slices import counters_of
from pretrain.checkpoint.writing import HostBuffer, take_snapshot
from pretrain.config.resolved import Resolved
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext, agree
from pretrain.runs.directory import ABOUT, GOOD, MARKER, WITHDRAWN
from pretrain.runs.position import Position
from pretrain.runs.removal import (
    make_room,
    put_away,
    remove_file,
    remove_left_behind,
    remove_oldest,
)
from pretrain.runs.storage import storage_sentence
from pretrain.runs.tags import CHECKPOINT_STALL_SECONDS
from pretrain.telemetry.records import SaveSeconds

LONGEST_SILENCE = 5.0
"""Seconds between two messages of ranks that wait for the end of a save."""
WORTH_SAYING = 0.1
"""Seconds that training waits for a save before the user is told."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        resolved: the configuration and its layout.
        context: this rank's place in the layout.
        identity: the run's settings, data and bank, from `run_identity`.
        resumed: the run's own checkpoint that it resumes from, if any.
        errors: holder of the errors for which all ranks must end.
        is_lost: whether the directory is another training's by now.
    """

    def __init__(
        self,
        resolved: Resolved,
        context: ParallelContext,
        identity: dict[str, Any],
        resumed: Path | None,
        errors: DeferredError,
        is_lost: Callable[[], bool],
    ) -> None:
        self.run = resolved.directory
        self._layout = resolved.layout
        self._section = resolved.config.checkpoint
        self._timeout = resolved.config.parallel.timeout_seconds
        self.context = context
        self.identity = identity
        self.errors = errors
        self._is_lost = is_lost
        self._resumed = resumed
        self._not_yet_good = None if resumed is None or (resumed / GOOD).exists() else resumed
        self._buffer = HostBuffer()
        self._saving: Saving | None = None
        self._in_background = False
        self._stall = 0.0
        self._written: SaveSeconds | None = None
        self._said_waiting = False
        self._left: str | None = None
        self._said_left = False

    def use_bank(self, bank: dict[str, str]) -> None:
        """Set the digests of the frozen bank that the next checkpoints state."""
        self.identity["frozen_bank"]["sha256"] = bank

    def save(self, engine: Any, position: Position, in_background: bool) -> str | None:
        """Begin to write a checkpoint, once the previous save is done (collective); see `commit`.

        Args:
            engine: a deepspeed.DeepSpeedEngine.
            position: progress of the run.
            in_background: return once this rank's values are copied; else once its file is written.

        Returns:
            A sentence for the user if training had to wait for the previous save.

        Raises:
            UserError: on every rank, if a rank could not write the previous checkpoint or begin
                this one.
        """
        started = time.perf_counter()
        path = self.run.checkpoint(position.step)
        waited = self.wait()
        if self.context.is_first:
            with self.errors.recording(path):
                make_room(self.run, path)
        if self.errors.recorded_anywhere():
            self.errors.raise_together()
        snapshot = take_snapshot(engine, self.context, self._buffer)
        about = About(
            **self.identity,
            position=position,
            counters=counters_of(engine),
            layout=self._layout.as_dict(),
        )
        self._saving = Saving(
            path=path,
            snapshot=snapshot,
            about=about if self.context.is_first else None,
            world_size=self.context.world_size,
            timeout=self._timeout,
            is_lost=self._is_lost,
            when_complete=self._on_complete,
        )
        if not in_background:
            self._saving.wait_for_own_part()
            self._written = SaveSeconds(self._saving.seconds_write, time.perf_counter() - started)
        self._stall = time.perf_counter() - started
        self._in_background = in_background
        if waited < WORTH_SAYING or self._said_waiting:
            return None
        self._said_waiting = True
        return (
            f"the checkpoint of step {position.step} waited {waited:.1f} s for the one before, "
            "which was still being written; raise checkpoint.every "
            f"({CHECKPOINT_STALL_SECONDS.tag} has every wait)"
        )

    def commit(self, good: bool) -> None:
        """Let the checkpoint of the last `save` count once it is complete.

        A checkpoint that is not saved in the background is complete when this returns (collective
        then).

        Args:
            good: whether the checkpoint is known good already.

        Raises:
            UserError: on every rank, if a save that is not in the background failed.
        """
        assert self._saving is not None
        self._not_yet_good = None if good else self._saving.path
        self._saving.let_count(good)
        if not self._in_background:
            self.wait()

    def wait(self) -> float:
        """Wait until no rank has a save in progress (collective).

        Returns:
            Seconds for which this rank's save was still in progress.

        Raises:
            UserError: on every rank, if a rank could not write; the checkpoint's files are removed.
        """
        path = None if self._saving is None else self._saving.path
        waited, someone_failed = self._wait_for_all()
        if someone_failed:
            self._clear(path)
            self.errors.raise_together()
        return waited

    def has_failed(self) -> bool:
        """Return whether this rank's save has failed, and collect the result of one that has ended.

        A failure is recorded in `self.errors`: all ranks must stop for it.
        """
        saving = self._saving
        if saving is None or saving.running:
            return False
        if saving.error is None and saving.good and self.context.is_first:
            try:
                self._mark_good(saving.path)
            except OSError as error:
                saving.error = error
        if saving.error is not None:
            self._record(saving, saving.error)
            return True
        self._saving = None
        if self._in_background:
            self._written = SaveSeconds(saving.seconds_write, self._stall + saving.seconds_write)
        return False

    def end(self, abandoned: bool) -> None:
        """Finish or discard the save in progress before the run exits (collective).

        A save that has been committed is finished. One that has not is discarded with its files.
        Write errors are recorded in `self.errors` and not raised here.

        Args:
            abandoned: discard the save even if committed, and leave its files: the directory now
                belongs to another run.
        """
        path = None if self._saving is None else self._saving.path
        if self._saving is not None and (abandoned or not self._saving.may_count):
            self._saving.abandon()
        self._wait_for_all()
        self._clear(None if abandoned else path)

    def _wait_for_all(self) -> tuple[float, bool]:
        """Wait until no save is in progress or one has failed (collective).

        Waiting ranks exchange a message every few seconds, so that no collective has to wait for a
        disk. Returns (seconds for which this rank's save was in progress, a rank could not write).
        """
        started = time.perf_counter()
        waited = 0.0
        while True:
            if self._saving is not None and self._saving.running:
                self._saving.join(min(LONGEST_SILENCE, self._timeout / 4))
                self._saving.require_progress()
                waited = time.perf_counter() - started
            failed = self.has_failed()
            waiting = self._saving is not None and not failed
            someone_waits, someone_failed = agree(
                [float(waiting), float(failed)], self.context.device
            )
            if someone_failed > 0 or someone_waits == 0:
                return waited, someone_failed > 0

    def _clear(self, path: Path | None) -> None:
        """Remove the checkpoint `path` if it is not complete (collective)."""
        self.close(wait=False)
        self._not_yet_good = None
        dist.barrier()  # nobody writes there any more
        if self.context.is_first and path is not None and path.exists():
            with suppress(OSError):
                put_away(self.run, path, begun_here=True)

    def take_written(self) -> SaveSeconds | None:
        """Return the times of the save that ended last; None if they have been returned before."""
        written, self._written = self._written, None
        return written

    def close(self, wait: bool) -> None:
        """End this rank's part in a save in progress.

        Args:
            wait: let a committed save finish first, which needs the other ranks to do the same.
        """
        if self._saving is not None:
            if wait and self._saving.may_count:
                self._saving.join(self._timeout)
            self._saving.abandon()
            self._saving.join(LONGEST_SILENCE)  # it ends after the chunk or the fsync that it is in
            self._saving = None

    def mark_good(self) -> None:
        """Mark the newest checkpoint as known good: its weights gave a finite loss."""
        if self._not_yet_good is None:
            return
        if self._saving is not None and self._saving.path == self._not_yet_good:
            self._saving.good = True
        elif self.context.is_first:
            self._mark_good(self._not_yet_good)
        self._not_yet_good = None

    def withdraw(self) -> None:
        """Withdraw the newest checkpoint, whose weights gave no finite loss.

        Not if it is known good. Collective: afterwards all ranks see the same newest checkpoint.
        The files stay.
        """
        with suppress(UserError):  # what could not be written needs no withdrawal
            self.wait()
        checkpoint = self._not_yet_good
        if self.context.is_first and checkpoint is not None and (checkpoint / MARKER).exists():
            with self.errors.recording(checkpoint):
                (checkpoint / MARKER).replace(checkpoint / WITHDRAWN)
                remove_file(self.run.latest)
                self.run.name_latest(self.run.newest_checkpoint())
        self._not_yet_good = None
        dist.barrier()

    def tidy(self) -> list[str]:
        """Put away what a killed run has left, and name the newest (rank 0, before any save).

        Returns:
            A line for the user for each checkpoint without its marker.
        """
        lines = []
        for path in self.run.unfinished_checkpoints():
            aside = put_away(self.run, path)
            if aside is None:
                lines.append(f"removed {path.name}, which a killed run had not finished to save")
            else:
                condition = "has all its files but" if (aside / ABOUT).exists() else "has lost"
                lines.append(f"kept aside as {aside.name}: {path.name} {condition} {MARKER}")
        remove_left_behind(self.run)
        self.run.name_latest(self._resumed)  # what `latest` named before has been judged
        return lines

    def _record(self, saving: Saving, error: Exception) -> None:
        if isinstance(error, OSError):
            needed = saving.snapshot.values.nbytes * self.context.world_size
            self.errors.record(UserError(storage_sentence(error, saving.path, needed)))
        elif isinstance(error, UserError):
            self.errors.record(error)
        else:
            raise error

    def _mark_good(self, checkpoint: Path) -> None:
        """Mark a complete checkpoint; what an abandoned save has left gets no mark."""
        if (checkpoint / MARKER).exists() and not (checkpoint / GOOD).exists():
            write_text_atomically(checkpoint / GOOD, "")
            self._remove_oldest()

    def _on_complete(self, checkpoint: Path) -> None:
        """Name the new checkpoint and remove old ones; runs on the thread of the save."""
        self.run.name_latest(checkpoint)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        self._left = remove_oldest(self.run, self._section.keep_last, self._section.every)

    def take_left(self) -> str | None:
        """Return a sentence about an old checkpoint that could not be removed; once in a run."""
        if self._said_left or self._left is None:
            return None
        self._said_left = True
        return f"{self._left}; training continues, and every save tries again"
