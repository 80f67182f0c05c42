"""Checkpoints without a training: files of a few ranks, complete, or a marker alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format import About, Block, StoredParameter, StoredSlice
from pretrain.checkpoint.writing import Snapshot, declare_complete, join_parts, write_snapshot
from pretrain.runs.directory import MARKER, RunDirectory
from pretrain.runs.position import Position

SHAPE = (6, 5)
FULL = torch.arange(30.0).view(SHAPE)
ROWS = (Block(0, 0, 2), Block(0, 2, 6))


def about(position: Position | None = None, **changes: Any) -> About:
    """What checkpoint.json says, of a run without data and bank."""
    content: dict[str, Any] = {
        "keys": {},
        "data": {"tokenizer": "a" * 64, "directories": [], "parts": []},
        "frozen_bank": {"recipe": None, "sha256": {}},
        "position": position or Position(),
        "counters": dict.fromkeys(
            ("global_steps", "global_samples", "micro_steps", "skipped_steps"), 0
        ),
        "layout": {},
    }
    return About(**content | changes)


def slice_of_full(rank: int, block: Block, start: int = 0, length: int | None = None) -> Snapshot:
    """A rank's part: elements of a block of FULL, and states that are a function of them."""
    flat = FULL.narrow(block.dim, block.first, block.last - block.first).flatten()
    values = flat[start:][:length]
    piece = StoredSlice(f"rank_{rank:05d}.safetensors", block, start, len(values))
    parameters = {"weight": StoredParameter(SHAPE, 3, (piece,))}
    return Snapshot(rank, parameters, torch.cat([values, -values, values**2]))


def write_checkpoint(path: Path, snapshots: Sequence[Snapshot], content: About) -> None:
    """Write every rank's part, and then COMPLETE."""
    path.mkdir(parents=True, exist_ok=True)
    for snapshot in snapshots:
        write_snapshot(snapshot, path, threading.Event())
    complete(path, len(snapshots), content)


def write_two_ranks(path: Path, content: About) -> None:
    """Write a complete checkpoint by two ranks, of one parameter in two blocks."""
    write_checkpoint(path, [slice_of_full(rank, ROWS[rank]) for rank in range(2)], content)


def bare_checkpoint(run: RunDirectory, step: int, marked: bool = True) -> Path:
    """Make the directory of a checkpoint, with nothing in it but the marker of a complete one."""
    path = run.checkpoint(step)
    path.mkdir(parents=True)
    if marked:
        (path / MARKER).write_text("{}")
    return path


def complete(path: Path, ranks: int, content: About) -> None:
    """Join what the ranks have written, and write COMPLETE."""
    files = join_parts(path, ranks, content, timeout=10, abandoned=threading.Event())
    declare_complete(path, files)
