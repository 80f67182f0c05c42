"""The checkpoints of a run: save, commit, keep the last few; and the digests of the frozen bank.

A checkpoint counts only once its COMPLETE marker is there, which names every file with its size and SHA-256.
It is known good once a loss of its very weights was finite: a later step's, or a validation's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_patches.freeze import frozen_layers
from megatron_patches.shards import head_digests, role_digest
from pretrain.checkpoint.format import About
from pretrain.checkpoint.layout import Layout
from pretrain.checkpoint.resuming import together
from pretrain.checkpoint.slices import counters_of
from pretrain.checkpoint.writing import HostBuffer, complete, take_snapshot, write_snapshot
from pretrain.config.tree import Config
from pretrain.ranks.groups import ParallelContext, require_equal_on_all_ranks
from pretrain.runs.directory import MARKER, PROVEN, RUINED, RunDirectory, write_text_atomically
from pretrain.runs.position import Position


class Checkpoints:
    """The checkpoints of one run.

    Args:
        identity: what they say of the run, `run_identity(...)`.
        resumed: the one that the run goes on from, if any.
    """

    def __init__(
        self, config: Config, context: ParallelContext, identity: dict[str, Any], resumed: Path | None
    ) -> None:
        self.run = RunDirectory(config.run_path)
        self.config = config
        self.context = context
        self.identity = identity
        self._unproven = None if resumed is None or (resumed / PROVEN).exists() else resumed
        self._buffer = HostBuffer()
        self._about: About | None = None

    def use_bank(self, bank: dict[str, str]) -> None:
        """Say from now on that the run's frozen bank has these digests."""
        self.identity["frozen_bank"]["sha256"] = bank

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None. `latest` is for people; the markers decide."""
        return self.run.newest_checkpoint()

    def save(self, engine: Any, position: Position) -> Path:
        """Write every rank's file of a checkpoint (collective). It does not count until `commit`.

        Raises:
            UserError: on every rank, if one cannot write.
        """
        path = self.run.checkpoint(position.step)

        def make_room() -> None:
            if self.context.is_first and path.exists():  # left by a run that was killed while saving
                shutil.rmtree(path)

        together(make_room)
        snapshot = take_snapshot(engine, self.context, self._buffer)
        layout = Layout.of(self.config, self.context).as_dict()
        self._about = About(**self.identity, position=position, counters=counters_of(engine), layout=layout)

        def write() -> None:
            path.mkdir(parents=True, exist_ok=True)
            write_snapshot(snapshot, path)

        together(write)
        return path

    def commit(self, path: Path, proven: bool) -> None:
        """Declare a saved checkpoint complete and remove the oldest ones (rank 0 writes).

        Args:
            proven: it is known good already.
        """
        self._unproven = path
        if self.context.is_first:
            assert self._about is not None
            timeout = self.config.parallel.timeout_seconds
            complete(path, self.context.world_size, self._about, timeout)
            self.name_latest(path)
        if proven:
            self.prove()
        elif self.context.is_first:
            self._remove_oldest()

    def prove(self) -> None:
        """The weights of the newest checkpoint gave a finite loss (rank 0 writes)."""
        if self._unproven is None:
            return
        if self.context.is_first:
            write_text_atomically(self._unproven / PROVEN, "")
            self._remove_oldest()
        self._unproven = None

    def withdraw(self) -> None:
        """No finite loss came of the newest checkpoint: unless it is known good, it counts no more.

        Collective: afterwards all ranks see the same newest checkpoint. The files stay.
        """
        if self.context.is_first and self._unproven is not None:
            (self._unproven / MARKER).replace(self._unproven / RUINED)
            self.run.latest.unlink(missing_ok=True)
            self.name_latest(self.newest())
        self._unproven = None
        dist.barrier()

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


def bank_digests(model: Any, context: ParallelContext) -> dict[str, str]:
    """SHA-256 of the live frozen bank for every (layer, role), independent of the layout (collective).

    Raises:
        UserError: on every rank, if two ranks hold different banks.
    """
    own: dict[tuple[int, str], dict[int, str]] = {}
    for _, layer in frozen_layers(model):
        for role, heads, weight in layer.frozen_shards():
            rows = weight.size(0) // max(1, len(heads))
            digests = head_digests(weight.cpu(), rows) if heads else []
            own[layer.layer, role] = dict(zip(heads, digests, strict=True))
    shards: list[Any] = [None] * context.tensor_parallel_size
    dist.all_gather_object(shards, own, group=context.tensor_parallel_group)
    bank = {}
    for place in own:
        by_head = {head: digest for shard in shards for head, digest in shard[place].items()}
        layer_number, role = place
        bank[f"layer={layer_number} role={role}"] = role_digest(by_head[head] for head in sorted(by_head))
    require_equal_on_all_ranks(
        "the frozen Query/Key bank",
        json.dumps(bank),
        "give every rank the same config, numpy version and CPU kind",
    )
    return bank
