"""Save, find, check and load checkpoints; regenerate and compare the frozen bank; keep the last few.

A checkpoint is DeepSpeed's directory plus `checkpoint.json` (what run it belongs to, and the recipe and
digests of the frozen bank, never the bank itself). It counts only once its COMPLETE marker is there, which
names every file and its size. It is known good once a loss of its very weights was finite: a later step's, or
a validation's.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_pipeline.blend import Blend
from megatron_patches.freeze import frozen_layers
from megatron_patches.shards import head_digests, role_digest
from pretrain.checkpoint.identity import accept_identity, run_identity
from pretrain.checkpoint.settings import OptimizerSettings
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext, require_equal_on_all_ranks
from pretrain.runs.directory import MARKER, PROVEN, RUINED, RunDirectory, step_of, write_text_atomically
from pretrain.runs.position import Position

_POSITION = "progress"
"""Its key in DeepSpeed's part of a checkpoint."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        bank: digests of this run's frozen bank, `bank_digests(...)`.
        blend: the training data.

    Attributes:
        changes: what `resume` found different about the data, and data.allow_change permits.
    """

    def __init__(self, config: Config, context: ParallelContext, bank: dict[str, str], blend: Blend) -> None:
        self.run = RunDirectory(config.run_path)
        self.config = config
        self.blend = blend
        self.keep_last = config.checkpoint.keep_last
        self.context = context
        self.use_bank(bank)
        self.allow_data_change = config.data.allow_change
        self.changes: list[str] = []
        self._unproven: Path | None = None

    def use_bank(self, bank: dict[str, str]) -> None:
        """Say from now on that the run's frozen bank is this one."""
        self.identity = run_identity(self.config, self.context, bank, self.blend)

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None. `latest` is for people; the markers decide."""
        return self.run.newest_checkpoint()

    def resume(self, engine: Any, newest: Path | None) -> Position:
        """Load a checkpoint of `find_newest_checkpoint` into `engine` (collective); None: start from step 0.

        Raises:
            UserError: the checkpoint belongs to another model, bank, data or layout, or a file of it is
                damaged.
        """
        if newest is None:
            return Position()
        check_files(newest)
        saved = read_identity(newest)
        self.changes = accept_identity(str(newest), saved, self.identity, self.allow_data_change)
        settings = OptimizerSettings.of(engine)
        path, client_state = engine.load_checkpoint(
            str(self.run.checkpoints), tag=newest.name, load_lr_scheduler_states=False
        )
        if path is None:
            raise UserError(
                f"DeepSpeed could not load {newest}; remove that directory to resume from the one before"
            )
        settings.restore(engine)
        self._unproven = None if (newest / PROVEN).exists() else newest
        return Position(**client_state[_POSITION])

    def save(self, engine: Any, position: Position) -> Path:
        """Write every file of a checkpoint (collective). It does not count until `commit`."""
        path = self.run.checkpoint(position.step)
        if self.context.is_first and path.exists():  # left by a run that was killed while saving
            shutil.rmtree(path)
        dist.barrier()
        engine.save_checkpoint(
            str(self.run.checkpoints),
            tag=path.name,
            client_state={_POSITION: asdict(position)},
            save_latest=False,
        )
        if self.context.is_first:
            write_text_atomically(path / "checkpoint.json", json.dumps(self.identity, indent=1))
        dist.barrier()
        return path

    def commit(self, path: Path, proven: bool) -> None:
        """Declare a saved checkpoint complete and remove the oldest ones (rank 0 writes).

        Args:
            proven: it is known good already.
        """
        self._unproven = path
        if self.context.is_first:
            self._mark_complete(path)
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

    def _mark_complete(self, path: Path) -> None:
        files = {str(f.relative_to(path)): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()}
        for name in files:
            _fsync(path / name)
        write_text_atomically(path / MARKER, json.dumps(files, indent=1))
        self.name_latest(path)

    def _remove_oldest(self) -> None:
        """Keep the last few, and the last that is known good."""
        newest_first = self.run.complete_checkpoints()
        good = [path for path in newest_first if (path / PROVEN).exists()][:1]
        for old in newest_first[max(1, self.keep_last) :]:
            if old in good:
                continue
            (old / MARKER).unlink()  # first, so that a half-deleted directory is never taken for a checkpoint
            shutil.rmtree(old)

    def name_latest(self, newest: Path | None) -> None:
        """Say in `latest` which checkpoint is the newest, for people and DeepSpeed's own tools (rank 0).

        A kill between a checkpoint's marker and this leaves an older name there, so a resume says it again.
        """
        if newest is not None:
            write_text_atomically(self.run.latest, newest.name + "\n")


def find_newest_checkpoint(config: Config) -> tuple[Path | None, int]:
    """The newest complete checkpoint and the step it was saved after; None and 0 without one (collective).

    Raises:
        UserError: on every rank, if they see different ones.
    """
    newest = RunDirectory(config.run_path).newest_checkpoint()
    require_equal_on_all_ranks(
        "the newest complete checkpoint",
        str(newest),
        "make the run directory visible and identical on every node",
    )
    return newest, step_of(newest) if newest is not None else 0


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


def read_identity(path: Path) -> dict[str, Any]:
    """What checkpoint.json of the checkpoint `path` says of its run; UserError if it cannot be read."""
    file = path / "checkpoint.json"
    try:
        saved: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); remove {path} to resume from an older one"
        ) from error
    if not {"keys", "data", "frozen_bank"} <= saved.keys():
        raise UserError(
            f"{file} was written by another version of this program; choose another run.name to start afresh"
        )
    return saved


def check_files(path: Path) -> None:
    """UserError if a file of the checkpoint `path` is missing or has another size than its marker says."""
    try:
        files = json.loads((path / MARKER).read_text())
        if not isinstance(files, dict) or not all(isinstance(size, int) for size in files.values()):
            raise ValueError("it does not name files with their sizes")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path / MARKER} is damaged ({error}); remove {path} to resume from an older checkpoint"
        ) from error
    for name, size in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
            raise UserError(
                f"{file} is {found}, but was saved with {size} bytes; "
                f"remove {path} to resume from an older checkpoint"
            )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
