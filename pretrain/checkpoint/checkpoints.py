"""The checkpoints of a run: save behind the training, keep the last few.

A checkpoint counts only once its COMPLETE marker is there, which names every file with its size and SHA-256.
It is known good once a loss of its very weights was finite: a later step's, or a validation's.

One save is under way at most. Its end is no collective: every rank sees that of its own thread (`saving`),
and what rank 0's has completed is on the disk. Where all ranks must know, they `wait`.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.checkpoint.deferred_error import Trouble
from pretrain.checkpoint.format import About
from pretrain.checkpoint.layout import Layout
from pretrain.checkpoint.saving import Saving
from pretrain.checkpoint.slices import counters_of
from pretrain.checkpoint.writing import HostBuffer, take_snapshot
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext, agree
from pretrain.runs.directory import MARKER, PROVEN, RUINED, RunDirectory, write_text_atomically
from pretrain.runs.position import Position
from pretrain.runs.storage import storage_sentence
from pretrain.runs.tags import CHECKPOINT_STALL_SECONDS
from pretrain.telemetry.records import SaveSeconds

LONGEST_SILENCE = 5.0
"""Seconds after which ranks that wait for the end of a save tell each other so."""
WORTH_SAYING = 0.1
"""Seconds of the training's waiting for a save."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        identity: what they say of the run, `run_identity(...)`.
        resumed: the one that the run goes on from, if any.
        trouble: takes what this rank could not write.
    """

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        identity: dict[str, Any],
        resumed: Path | None,
        trouble: Trouble,
    ) -> None:
        self.run = RunDirectory(config.run_path)
        self.config = config
        self.context = context
        self.identity = identity
        self.trouble = trouble
        self._unproven = None if resumed is None or (resumed / PROVEN).exists() else resumed
        self._buffer = HostBuffer()
        self._saving: Saving | None = None
        self._behind = False
        self._stall = 0.0
        self._written: SaveSeconds | None = None
        self._said_waiting = False

    def use_bank(self, bank: dict[str, str]) -> None:
        """Say from now on that the run's frozen bank has these digests."""
        self.identity["frozen_bank"]["sha256"] = bank

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None. `latest` is for people; the markers decide."""
        return self.run.newest_checkpoint()

    def save(self, engine: Any, position: Position, behind: bool) -> str | None:
        """Begin to write a checkpoint, after the one before (collective). It does not count until `commit`.

        Args:
            behind: go on as soon as what is to be written is copied; else once this rank has written it.

        Returns:
            What to tell the user about the save before, if the training had to wait for it.

        Raises:
            UserError: on every rank, if one could not write the checkpoint before, or cannot begin this one.
        """
        started = time.perf_counter()
        path = self.run.checkpoint(position.step)
        waited = self.wait()

        if self.context.is_first and path.exists():  # withdrawn, or left by a run that was killed
            with self.trouble.writing(path):
                shutil.rmtree(path)
        self.trouble.settle()
        snapshot = take_snapshot(engine, self.context, self._buffer)
        self._saving = Saving(
            path,
            snapshot,
            self._about(engine, position) if self.context.is_first else None,
            self.context.world_size,
            self.config.parallel.timeout_seconds,
            self._on_complete,
        )
        if not behind:
            self._saving.wait_for_own_part()
            self._written = SaveSeconds(self._saving.seconds_write, time.perf_counter() - started)
        self._stall = time.perf_counter() - started
        self._behind = behind
        if waited < WORTH_SAYING or self._said_waiting:
            return None
        self._said_waiting = True
        return (
            f"the checkpoint of step {position.step} waited {waited:.1f} s for the one before, which was "
            f"still being written; raise checkpoint.every ({CHECKPOINT_STALL_SECONDS.tag} has every wait)"
        )

    def commit(self, proven: bool) -> None:
        """Let the checkpoint count once all of it is there; one that is not `behind` is there afterwards.

        Args:
            proven: it is known good already.

        Raises:
            UserError: on every rank, if one that is not behind could not be written (collective then).
        """
        assert self._saving is not None
        self._unproven = None if proven else self._saving.path
        self._saving.let_count(proven)
        if not self._behind:
            self.wait()

    def wait(self) -> float:
        """Until no rank has a save under way (collective); the seconds for which this rank's was.

        Raises:
            UserError: on every rank, if one could not write; nothing of that checkpoint is left.
        """
        path = self._path_under_way()
        waited, someone_failed = self._wait_for_all()
        if someone_failed:
            self._clear(path)
            self.trouble.tell()
        return waited

    def has_failed(self) -> bool:
        """Whether this rank could not write its part; also takes note of a save that has ended well.

        That it failed is trouble, for which all ranks must stop.
        """
        saving = self._saving
        if saving is None or saving.running:
            return False
        if saving.error is None and saving.proven and self.context.is_first:
            try:
                self._mark_proven_late(saving.path)
            except OSError as error:
                saving.error = error
        if saving.error is not None:
            self._note(saving, saving.error)
            return True
        self._saving = None
        if self._behind:
            self._written = SaveSeconds(saving.seconds_write, self._stall + saving.seconds_write)
        return False

    def end(self, abandoned: bool) -> None:
        """The run stops: leave nothing of a save under way, unless it comes to its end (collective).

        One that may not count yet does not. What the ranks cannot write is trouble, and not raised.

        Args:
            abandoned: it is not to count in any case, and its files are no more this run's to remove.
        """
        path = self._path_under_way()
        if self._saving is not None and (abandoned or not self._saving.may_count):
            self._saving.abandon()
        self._wait_for_all()
        self._clear(None if abandoned else path)

    def _wait_for_all(self) -> tuple[float, bool]:
        """Until no save is under way or one has failed (collective).

        Ranks tell each other now and then that they still wait, so that no collective waits for a disk.

        Returns:
            Seconds for which this rank's was under way; whether a rank could not write.
        """
        started, waited = time.perf_counter(), 0.0
        while True:
            if self._saving is not None and self._saving.running:
                self._saving.join(min(LONGEST_SILENCE, self.config.parallel.timeout_seconds / 4))
                waited = time.perf_counter() - started
            failed = self.has_failed()
            waiting = self._saving is not None and not failed
            someone_waits, someone_failed = agree([float(waiting), float(failed)], self.context.device)
            if someone_failed > 0 or someone_waits == 0:
                return waited, someone_failed > 0

    def _path_under_way(self) -> Path | None:
        return self._saving.path if self._saving is not None else None

    def _clear(self, path: Path | None) -> None:
        """Leave nothing of the checkpoint `path` if it is not complete (collective)."""
        self.close(wait=False)
        self._unproven = None
        dist.barrier()  # nobody writes there any more
        if self.context.is_first and path is not None and not (path / MARKER).exists():
            shutil.rmtree(path, ignore_errors=True)

    def take_written(self) -> SaveSeconds | None:
        """How long the save took that was last seen to be written; None if there is nothing new to say."""
        written, self._written = self._written, None
        return written

    def close(self, wait: bool) -> None:
        """End this rank's part in a save under way. If the other ranks do so too, one can `wait` for it."""
        if self._saving is not None:
            if wait:
                self._saving.finish(self.config.parallel.timeout_seconds)
            self._saving.abandon()
            self._saving.join(LONGEST_SILENCE)  # it ends after the chunk or the fsync that it is in
            self._saving = None

    def prove(self) -> None:
        """The weights of the newest checkpoint gave a finite loss (rank 0 writes)."""
        if self._unproven is None:
            return
        if self._saving is not None and self._saving.path == self._unproven:
            self._saving.prove()
        elif self.context.is_first:
            self._mark_proven(self._unproven)
        self._unproven = None

    def withdraw(self) -> None:
        """No finite loss came of the newest checkpoint: unless it is known good, it counts no more.

        Collective: afterwards all ranks see the same newest checkpoint. The files stay.
        """
        with suppress(UserError):  # what could not be written needs no withdrawal
            self.wait()
        if self.context.is_first and self._unproven is not None and (self._unproven / MARKER).exists():
            with self.trouble.writing(self._unproven):
                (self._unproven / MARKER).replace(self._unproven / RUINED)
                self.run.latest.unlink(missing_ok=True)
                self.name_latest(self.newest())
        self._unproven = None
        dist.barrier()

    def remove_unfinished(self) -> list[str]:
        """Remove what a run that was killed while saving has left (rank 0, before any save); their names."""
        left = self.run.unfinished_checkpoints()
        for path in left:
            shutil.rmtree(path)
        for path in self.run.checkpoints.glob(f".{self.run.latest.name}.*"):
            path.unlink()
        return [path.name for path in left]

    def _about(self, engine: Any, position: Position) -> About:
        layout = Layout.of(self.config, self.context).as_dict()
        return About(**self.identity, position=position, counters=counters_of(engine), layout=layout)

    def _note(self, saving: Saving, error: Exception) -> None:
        if isinstance(error, OSError):
            needed = saving.bytes * self.context.world_size
            self.trouble.note(storage_sentence(error, saving.path, needed))
        elif isinstance(error, UserError):
            self.trouble.note(str(error))
        else:
            raise error

    def _mark_proven(self, checkpoint: Path) -> None:
        write_text_atomically(checkpoint / PROVEN, "")
        self._remove_oldest()

    def _mark_proven_late(self, checkpoint: Path) -> None:
        """What its thread has ended too early for. One that was abandoned is not complete, and not meant."""
        if (checkpoint / MARKER).exists() and not (checkpoint / PROVEN).exists():
            self._mark_proven(checkpoint)

    def _on_complete(self, checkpoint: Path) -> None:
        """On the thread of the save."""
        self.name_latest(checkpoint)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Keep the last few, and the last that is known good."""
        newest_first = self.run.complete_checkpoints()
        good = [path for path in newest_first if (path / PROVEN).exists()][:1]
        for old in newest_first[max(1, self.config.checkpoint.keep_last) :]:
            if old in good:
                continue
            (old / MARKER).unlink()  # first, so that a half-deleted directory is never taken for a checkpoint
            shutil.rmtree(old)

    def name_latest(self, newest: Path | None) -> None:
        """Say in `latest` which checkpoint is the newest, for people (rank 0).

        A kill between a checkpoint's marker and this leaves an older name there, so a resume says it again.
        """
        if newest is not None:
            write_text_atomically(self.run.latest, newest.name + "\n")
