"""Files of a checkpoint without an engine: written, completed, read in blocks; gaps and absentees named."""

import threading
from itertools import product
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.format import About, Block, StoredParameter, StoredSlice
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.checkpoint.writing import Snapshot, declare_complete, join_parts, write_snapshot
from pretrain.errors import UserError
from pretrain.runs.position import Position

SHAPE = (6, 5)
FULL = torch.arange(30.0).view(SHAPE)
ABOUT = About({}, {}, {}, Position(), {}, {})


def write(path: Path, blocks: list[Block], slices_per_block: int) -> None:
    """Every slice by a rank of its own."""
    path.mkdir()
    rank = 0
    for block in blocks:
        flat = FULL.narrow(block.dim, block.first, block.last - block.first).flatten()
        start = 0
        for values in flat.tensor_split(slices_per_block):
            own = StoredSlice(f"rank_{rank:05d}.safetensors", block, start, len(values))
            parameters = {"weight": StoredParameter(SHAPE, 3, (own,))}
            snapshot = Snapshot(rank, parameters, torch.cat([values, -values, values**2]))
            write_snapshot(snapshot, path, threading.Event())
            start, rank = start + len(values), rank + 1
    declare_complete(path, join_parts(path, rank, ABOUT, 10, threading.Event()))


CUTS = ([Block(0, 0, 6)], [Block(0, 0, 2), Block(0, 2, 6)], [Block(1, 0, 3), Block(1, 3, 5)])


@pytest.mark.parametrize(("blocks", "pieces"), [*product(CUTS, (1, 4))])
def test_any_range_of_any_block_is_read(blocks: list[Block], pieces: int, tmp_path: Path) -> None:
    write(tmp_path / "step_00000001", blocks, pieces)
    stored = StoredCheckpoint(tmp_path / "step_00000001")
    assert stored.parameters["weight"].step == 3
    for kind, full in (("master", FULL), ("exp_avg", -FULL), ("exp_avg_sq", FULL**2)):
        assert torch.equal(stored.full(kind, "weight"), full)
        for block in (block for cut in CUTS for block in cut):
            flat = full.narrow(block.dim, block.first, block.last - block.first).flatten()
            for start, length in ((0, len(flat)), (3, 4), (len(flat) - 1, 1)):
                read = stored.elements(kind, "weight", block, start, length)
                assert torch.equal(read, flat[start : start + length])


def test_a_rank_that_does_not_write_is_named(tmp_path: Path) -> None:
    own = StoredSlice("rank_00000.safetensors", Block(0, 0, 6), 0, 30)
    parameters = {"weight": StoredParameter(SHAPE, 3, (own,))}
    write_snapshot(Snapshot(0, parameters, torch.zeros(90)), tmp_path, threading.Event())
    with pytest.raises(UserError, match=r"rank 1 has not written its part of .* within 0 s"):
        join_parts(tmp_path, 2, ABOUT, 0.2, threading.Event())
    assert not (tmp_path / "COMPLETE").exists()


@pytest.mark.parametrize(
    ("slices", "gap"),
    [
        ([(Block(0, 0, 6), 0, 30)], None),
        ([(Block(0, 0, 6), 0, 20), (Block(0, 0, 6), 20, 10)], None),
        ([(Block(0, 0, 6), 0, 20)], "nothing lies at element 20 of its part from 0 on"),
        ([(Block(0, 0, 6), 0, 20), (Block(0, 0, 6), 10, 20)], "nothing lies at element 20"),
        ([(Block(0, 0, 4), 0, 20)], "nothing lies at 4 of dimension 0"),
        ([(Block(1, 0, 3), 0, 18), (Block(1, 4, 5), 0, 6)], "nothing lies at 3 of dimension 1"),
        ([(Block(0, 0, 7), 0, 35)], "nothing lies at 0 of dimension 0"),
        ([(Block(0, 0, 2), 0, 10), (Block(1, 2, 5), 0, 18)], "do not lie along one dimension"),
        ([], "do not lie along one dimension"),
    ],
)
def test_gaps_are_found(slices: list[tuple[Block, int, int]], gap: str | None) -> None:
    found = StoredParameter(SHAPE, 1, tuple(StoredSlice("file", *piece) for piece in slices)).gap()
    assert (found is None) == (gap is None)
    assert found is None or str(gap) in found
