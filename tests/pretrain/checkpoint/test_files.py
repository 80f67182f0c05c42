"""Files of a checkpoint without an engine: written, read in blocks, gaps named."""

import os
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import writing
from pretrain.checkpoint.format import (
    Block,
    StoredFile,
    StoredParameter,
    StoredSlice,
    read_about,
    read_index,
    read_marker,
)
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.checkpoint.saving import Saving
from pretrain.checkpoint.verify import hash_problems, verify
from pretrain.checkpoint.writing import Snapshot, declare_complete, write_snapshot
from pretrain.errors import UserError
from pretrain.runs.position import Position
from tests.fabricated_checkpoints import (
    FULL,
    ROWS,
    SHAPE,
    about,
    complete,
    slice_of_full,
    write_checkpoint,
    write_two_ranks,
)
from tests.fabricated_runs import edit_json

CUTS = ((Block(0, 0, 6),), ROWS, (Block(1, 0, 3), Block(1, 3, 5)))


@pytest.mark.parametrize(("blocks", "pieces"), [*product(CUTS, (1, 4))])
def test_any_range_of_any_block_is_read(
    blocks: tuple[Block, ...], pieces: int, tmp_path: Path
) -> None:
    snapshots: list[Snapshot] = []
    for block in blocks:
        elements = torch.Size(block.shape(SHAPE)).numel()
        for places in torch.arange(elements).tensor_split(pieces):  # each by a rank of its own
            start = int(places[0])
            snapshots.append(slice_of_full(len(snapshots), block, start, len(places)))
    write_checkpoint(tmp_path / "step_00000001", snapshots, about())
    stored = StoredCheckpoint(tmp_path / "step_00000001")
    assert stored.parameters["weight"].step == 3
    for kind, full in (("master", FULL), ("exp_avg", -FULL), ("exp_avg_sq", FULL**2)):
        assert torch.equal(stored.full(kind, "weight"), full)
        for block in (block for cut in CUTS for block in cut):
            flat = full.narrow(block.dim, block.first, block.last - block.first).flatten()
            for start, length in ((0, len(flat)), (3, 4), (len(flat) - 1, 1)):
                read = stored.elements(kind, "weight", block=block, start=start, length=length)
                assert torch.equal(read, flat[start : start + length])


def test_each_parameter_has_the_states_of_its_own_optimizer(tmp_path: Path) -> None:
    """Beside AdamW's two moments, one state without a count of its updates, and none at all."""
    file = "rank_00000.safetensors"
    block = Block(0, 0, 2)
    states: dict[str, tuple[str, ...]] = {
        "moments": ("exp_avg", "exp_avg_sq"),
        "momentum": ("momentum_buffer",),
        "bare": (),
    }
    parameters = {
        name: StoredParameter(
            (2,), 3 if name == "moments" else None, (StoredSlice(file, block, 0, 2),), states=kept
        )
        for name, kept in states.items()
    }
    snapshot = Snapshot(0, parameters, torch.arange(12.0))
    write_checkpoint(tmp_path / "step_00000001", [snapshot], about())
    stored = StoredCheckpoint(tmp_path / "step_00000001")
    stored_values = {
        f"{kind}/{name}": stored.full(kind, name).tolist()
        for name, parameter in stored.parameters.items()
        for kind in parameter.kinds
    }
    assert stored_values == {
        "master/moments": [0, 1],
        "master/momentum": [2, 3],
        "master/bare": [4, 5],
        "exp_avg/moments": [6, 7],
        "exp_avg_sq/moments": [8, 9],
        "momentum_buffer/momentum": [10, 11],
    }
    assert [stored.parameters[name].step for name in states] == [3, None, None]


def test_other_ranks_files_are_looked_for_once_the_checkpoint_may_count(tmp_path: Path) -> None:
    """All are there by then if training waits, and NFS hides what was looked for too early."""
    path = tmp_path / "step_00000001"
    path.mkdir()
    write_snapshot(slice_of_full(1, ROWS[1]), path, threading.Event())
    saving = Saving(
        path=path,
        snapshot=slice_of_full(0, ROWS[0]),
        about=about(),
        world_size=2,
        timeout=10,
        is_lost=lambda: False,
        when_complete=lambda path: None,
    )
    saving.wait_for_own_part()
    time.sleep(0.2)
    assert not (path / "parameters.json").exists()
    saving.let_count(good=False)
    saving.join(10)
    assert saving.error is None and read_index(path)["weight"].gap() is None


def test_a_large_file_is_made_durable_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow file system then shows within a part of the timeout that it takes something."""
    sizes: list[int] = []
    fsync = os.fsync

    def measured(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(writing, "CHUNK", 32)
    monkeypatch.setattr(writing, "SYNCED", 64)
    monkeypatch.setattr(os, "fsync", measured)
    write_snapshot(slice_of_full(0, CUTS[0][0]), tmp_path, threading.Event())
    whole = (tmp_path / "rank_00000.safetensors").stat().st_size
    of_file = sizes[: sizes.index(whole) + 1]
    steps = [after - previous for previous, after in zip([0, *of_file], of_file, strict=False)]
    assert len(steps) > 5 and max(steps[1:]) < 64 + 32


def test_the_name_of_a_checkpoint_is_durable_before_it_counts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_marker(checkpoint)
    (checkpoint / "COMPLETE").unlink()
    synced: dict[Path, bool] = {}

    def note(directory: Path) -> None:
        synced.setdefault(directory, (checkpoint / "COMPLETE").exists())

    monkeypatch.setattr(writing, "sync_directory", note)
    declare_complete(checkpoint, files)
    assert synced == {checkpoint: False, checkpoint.parent: False}


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
    sentence = StoredParameter(
        SHAPE, 1, tuple(StoredSlice("file", *piece) for piece in slices)
    ).gap()
    assert (sentence is None) == (gap is None)
    assert sentence is None or str(gap) in sentence


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of two ranks, at step 1."""
    path = tmp_path / "step_00000001"
    write_two_ranks(path, about(Position(1, 8, 64)))
    return path


def test_another_format_is_told_and_not_read(checkpoint: Path) -> None:
    verify(checkpoint, True)
    edit_json(checkpoint / "checkpoint.json", lambda content: content.update(format=3))
    with pytest.raises(UserError, match=r"has format 3 and this version .* reads 1 and 2; use the"):
        read_about(checkpoint)


@pytest.mark.parametrize(
    ("file", "keys", "value", "problem"),
    [
        ("checkpoint.json", ("position", "step"), -1, "position.step: input should be greater"),
        ("checkpoint.json", ("position", "step"), 1 << 60, "position.step: input should be less"),
        ("checkpoint.json", ("position", "step"), 1.0, "position.step: input should be a valid"),
        ("checkpoint.json", ("position", "usual_loss", "variance"), -1.0, "usual_loss.variance"),
        ("checkpoint.json", ("counters", "global_steps"), "7", "counters.global_steps: input"),
        ("checkpoint.json", ("counters", "global_steps"), None, "counters.global_steps: input"),
        ("checkpoint.json", ("frozen_bank", "sha256"), [], "frozen_bank.sha256: input should"),
        ("checkpoint.json", ("data", "tokenizer"), 3, "data.tokenizer: input should be a valid"),
        ("parameters.json", ("weight", "step"), -3, "weight.step: input should be greater"),
        ("parameters.json", ("weight", "shape"), [], "weight.shape: tuple should have at least"),
        ("parameters.json", ("weight", "states"), "momentum", "weight.states: input should be"),
        ("parameters.json", ("weight", "dtype"), "bfloat16", "weight.dtype: input should be 'fl"),
    ],
)
def test_a_value_out_of_bounds_is_named(
    checkpoint: Path, file: str, keys: tuple[str, ...], value: object, problem: str
) -> None:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    edit_json(checkpoint / file, change)
    with pytest.raises(UserError, match=f"{file} is damaged: .*{problem}.*; restore it, or take"):
        StoredCheckpoint(checkpoint)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"length": 9}, "does not have all of 'weight': nothing lies at element 9 of its part"),
        ({"file": "rank_00007.safetensors"}, "names rank_00007.safetensors, which COMPLETE does"),
        ({"file": "checkpoint.json"}, "names 120 bytes of checkpoint.json, which has fewer"),
    ],
)
def test_an_index_with_a_gap_or_a_stranger_is_damaged(
    checkpoint: Path, change: dict[str, Any], problem: str
) -> None:
    (checkpoint / "checkpoint.json").write_text("{}")
    edit_json(checkpoint / "COMPLETE", lambda files: files["checkpoint.json"].update(bytes=2))
    assert read_index(checkpoint)["weight"].step == 3
    edit_json(
        checkpoint / "parameters.json", lambda index: index["weight"]["slices"][0].update(change)
    )
    with pytest.raises(UserError, match=f"parameters.json {problem}.*; restore it, or take"):
        read_index(checkpoint)


@pytest.mark.parametrize(
    ("block", "change", "problem"),
    [
        (Block(0, 2, 6), {"shape": (6, 6)}, "disagree about the shape, step or states of 'weight'"),
        (Block(0, 2, 6), {"step": 4}, "disagree about the shape, step or states of 'weight'"),
        (Block(0, 3, 6), {}, "does not have all of 'weight': nothing lies at 2 of dimension 0"),
    ],
)
def test_ranks_that_do_not_fit_each_other(
    tmp_path: Path, block: Block, change: dict[str, Any], problem: str
) -> None:
    write_snapshot(slice_of_full(0, Block(0, 0, 2)), tmp_path, threading.Event())
    write_snapshot(slice_of_full(1, block), tmp_path, threading.Event())
    sidecar = tmp_path / "rank_00001.written"
    edit_json(sidecar, lambda content: content["parameters"]["weight"].update(change))
    with pytest.raises(RuntimeError, match=problem):
        complete(tmp_path, 2, about())


def test_what_verify_finds(checkpoint: Path) -> None:
    file = checkpoint / "rank_00001.safetensors"
    content = file.read_bytes()
    for share in ((0, 3), (1, 3), (2, 3)):
        verify(checkpoint, True, share=share)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refusals = []
    for rank in range(3):  # each hashes a part of the files; one of them has this one
        try:
            verify(checkpoint, True, share=(rank, 3))
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) == 1 and f"{file} does not have the SHA-256" in refusals[0]
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


def test_alone_verify_reads_every_file_and_says_how_far(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.checkpoint.verify.SECONDS_BETWEEN_LINES", -1.0)
    said: list[str] = []
    verify(checkpoint, True, say=said.append)
    files = [file for file in checkpoint.iterdir() if file.name != "COMPLETE"]
    assert len(files) == len(said) == 4
    assert set(said) == {"verifying step_00000001: 0.0 of 0.0 GB"}
    for file in files:
        content = file.read_bytes()
        for index in (0, -1):
            changed = bytearray(content)
            changed[index] ^= 1
            file.write_bytes(changed)
            with pytest.raises(UserError, match=file.name):
                verify(checkpoint, True)
        file.write_bytes(content)


@pytest.mark.parametrize(
    "content", ["", "{", '"x"', "[1]", "null", "3", '{"a": "b"}', '{"a": null}', "{}"]
)
def test_a_marker_with_nonsense_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "COMPLETE").write_text(content)
    problem = r"COMPLETE (is damaged: .*|does not name the files.*); restore it"
    with pytest.raises(UserError, match=problem):
        read_marker(tmp_path)


def test_a_marker_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "COMPLETE").mkdir()
    with pytest.raises(UserError, match=r"COMPLETE cannot be read \("):
        read_marker(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.phases", 7),
        ("attention.phases", [7]),
        ("attention.phases", [{"at": "x", "train": "0-3"}]),
        ("attention.unfreeze", [7, None]),
        ("attention.frozen_heads", [1.0]),
        ("attention.adapters", [3]),
        ("model.num_layers", "4"),
        ("model.qk_norm", 1),
        ("optimizer.momentum", "0.9"),
        ("data.sequence_length", {}),
    ],
)
def test_a_setting_of_another_type_is_named(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "step_00000000"
    write_checkpoint(path, [slice_of_full(0, CUTS[0][0])], about(keys={key: value}))
    said = rf"checkpoint\.json is damaged: {key} is .*: .*; restore it, or take another checkpoint"
    with pytest.raises(UserError, match=said):
        read_about(path)
    settings = {"attention.unfreeze": [{"at": 0.5, "layers": "0-3"}], "attention.variant": "gone"}
    write_checkpoint(path, [slice_of_full(0, CUTS[0][0])], about(keys=settings))
    assert read_about(path).keys == settings


def test_a_file_far_longer_than_its_header_says_is_not_read_to_its_end(tmp_path: Path) -> None:
    """COMPLETE names its size, a terabyte."""
    path = tmp_path / "step_00000000"
    write_checkpoint(path, [slice_of_full(0, CUTS[0][0])], about())
    part = path / "rank_00000.safetensors"
    os.truncate(part, 1 << 40)
    edit_json(path / "COMPLETE", lambda files: files[part.name].update(bytes=1 << 40))
    with pytest.raises(UserError, match=r"rank_00000\.safetensors is not what its header names"):
        verify(path, by_hash=True)
    os.truncate(path / "parameters.json", 1 << 40)
    files = {"parameters.json": StoredFile(1 << 40, "a" * 64)}
    (problem,) = hash_problems(path, files, say=lambda line: None)
    assert "parameters.json has 1,099,511,627,776 bytes, far more" in str(problem)
