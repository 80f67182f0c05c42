"""Files of a checkpoint without an engine: written, completed, read in blocks; gaps and absentees named."""

import dataclasses
import json
import threading
from itertools import product
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.format import (
    About,
    Block,
    StoredParameter,
    StoredSlice,
    read_about,
    read_index,
)
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.checkpoint.verify import verify
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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of two ranks, at step 1."""
    path = tmp_path / "step_00000001"
    path.mkdir()
    for rank, block in enumerate(CUTS[1]):
        values = FULL.narrow(0, block.first, block.last - block.first).flatten()
        own = StoredSlice(f"rank_{rank:05d}.safetensors", block, 0, len(values))
        parameters = {"weight": StoredParameter(SHAPE, 3, (own,))}
        write_snapshot(Snapshot(rank, parameters, torch.cat([values] * 3)), path, threading.Event())
    about = dataclasses.replace(ABOUT, position=Position(1, 8, 64))
    declare_complete(path, join_parts(path, 2, about, 10, threading.Event()))
    return path


def test_another_format_is_told_and_not_read(checkpoint: Path) -> None:
    verify(checkpoint, True)
    about = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "checkpoint.json").write_text(json.dumps(about | {"format": about["format"] + 1}))
    with pytest.raises(
        UserError, match=rf"has format {about['format'] + 1} and this version .* reads "
    ):
        read_about(checkpoint)


def test_an_index_with_a_gap_or_a_stranger_is_damaged(checkpoint: Path) -> None:
    file = checkpoint / "parameters.json"
    index = json.loads(file.read_text())
    assert read_index(checkpoint)["weight"].step == 3
    for change, problem in (
        (
            {"length": 9},
            "does not have all of 'weight': nothing lies at element 9 of its part from 0 on",
        ),
        (
            {"file": "rank_00007.safetensors"},
            "names rank_00007.safetensors, which COMPLETE does not",
        ),
    ):
        pieces = [index["weight"]["slices"][0] | change, index["weight"]["slices"][1]]
        file.write_text(json.dumps({"weight": index["weight"] | {"slices": pieces}}))
        with pytest.raises(UserError, match=f"parameters.json {problem}; restore it, or set"):
            read_index(checkpoint)


@pytest.mark.parametrize(
    ("shape", "step", "problem"),
    [
        ((6, 6), 3, "two ranks disagree about the shape or step of 'weight'"),
        (SHAPE, 4, "two ranks disagree about the shape or step of 'weight'"),
        (
            SHAPE,
            3,
            "what the ranks wrote does not have all of 'weight': nothing lies at 2 of dimension 0",
        ),
    ],
)
def test_ranks_that_do_not_fit_each_other(
    tmp_path: Path, shape: tuple[int, int], step: int, problem: str
) -> None:
    for rank, (size, block, count) in enumerate(
        ((SHAPE, Block(0, 0, 2), 3), (shape, Block(0, 3, 6), step))
    ):
        own = StoredSlice(
            f"rank_{rank:05d}.safetensors", block, 0, (block.last - block.first) * size[1]
        )
        parameters = {"weight": StoredParameter(size, count, (own,))}
        write_snapshot(
            Snapshot(rank, parameters, torch.zeros(3 * own.length)), tmp_path, threading.Event()
        )
    with pytest.raises(RuntimeError, match=problem):
        join_parts(tmp_path, 2, ABOUT, 10, threading.Event())


def test_what_verify_finds(checkpoint: Path) -> None:
    verify(checkpoint, True, share=(1, 3))
    file = checkpoint / "rank_00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for share in ((0, 3), (1, 3), (2, 3)):  # each hashes a part; one of them has the file
        if share[0] == _place(checkpoint, file):
            with pytest.raises(
                UserError, match=r"rank_00001\.safetensors does not have the SHA-256"
            ):
                verify(checkpoint, True, share=share)
        else:
            verify(checkpoint, True, share=share)
    verify(checkpoint, False)
    file.write_bytes(content[:-1])
    size = len(content)
    with pytest.raises(UserError, match=f"is {size - 1} bytes, but was saved with {size} bytes"):
        verify(checkpoint, False)
    file.unlink()
    with pytest.raises(UserError, match=r"rank_00001.safetensors is missing; restore it"):
        verify(checkpoint, False)
    file.write_bytes(content)
    checkpoint = checkpoint.rename(checkpoint.with_name("step_00000002"))
    with pytest.raises(UserError, match=r"checkpoint.json is of step 1; restore it"):
        verify(checkpoint, True)


def _place(checkpoint: Path, file: Path) -> int:
    """Which of three ranks hashes the file: the largest come first, those of one size by name."""
    files = [path for path in checkpoint.iterdir() if path.name != "COMPLETE"]
    return sorted(files, key=lambda path: (-path.stat().st_size, path.name)).index(file) % 3


def test_alone_verify_reads_every_file_and_says_how_far(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.checkpoint.verify.SECONDS_BETWEEN_LINES", -1.0)
    said: list[str] = []
    verify(checkpoint, True, say=said.append)
    files = [file for file in checkpoint.iterdir() if file.name != "COMPLETE"]
    assert len(files) == len(said) == 4
    assert set(said) == {"verifying step_00000001: 0.0 of 0.0 GB of this rank"}
    for file in files:
        content = file.read_bytes()
        for change in (
            content[:-1] + bytes([content[-1] ^ 1]),
            bytes([content[0] ^ 1]) + content[1:],
        ):
            file.write_bytes(change)
            with pytest.raises(UserError, match=file.name):
                verify(checkpoint, True)
        file.write_bytes(content)
