"""Shards are made of whole units up to a size: always the same bytes, however that is cut and interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data_pipeline.errors import DataError
from data_pipeline.io.files import to_json
from data_pipeline.io.pool import Progress
from data_pipeline.shards import manifest
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.verify import find_problems
from data_pipeline.shards.writing import index_size
from data_pipeline.sources.discovery import find_inputs
from data_pipeline.tokenizing.assemble import Assembler
from data_pipeline.tokenizing.plan import Task, TokenizeOptions, read_plan
from data_pipeline.tokenizing.run import merge_manifests
from data_pipeline.tokenizing.work_unit import read_record
from tests.data_pipeline.helpers import Workshop, contents, make_task, quiet, run, tokenize

SMALL = TokenizeOptions("small", range_bytes=100_000, shard_bytes=150_000)


def test_shards_are_whole_units_up_to_a_size(workshop: Workshop, tmp_path: Path) -> None:
    files = find_inputs([workshop.corpus]).files
    manifest, _ = tokenize(files, workshop.model, tmp_path / "a", SMALL, 1, quiet)
    large = read_manifest(workshop.shards)
    assert len(large.shards) == 6 and len(manifest.shards) > 10
    for split in ("train", "validation"):
        for source in manifest.sources(split):
            shards = manifest.shards_of(split, source)
            assert [shard.number for shard in shards] == list(range(len(shards)))
            units = [unit for shard in shards for unit in shard.units]
            assert units == sorted(set(units))  # a unit is in one shard of a source
            assert all(
                s.bin_bytes + s.idx_bytes <= SMALL.shard_bytes or len(s.units) == 1 for s in shards
            )
            assert all(sum(s.unit_documents) == s.documents for s in shards)
            # One after the other they are the one large shard, as megatron-core reads it.
            (whole,) = large.shards_of(split, source)
            read = [IndexedDataset(str(manifest.prefix(shard))) for shard in shards]
            expected = IndexedDataset(str(large.prefix(whole)))
            documents = [dataset[number] for dataset in read for number in range(len(dataset))]
            assert len(documents) == len(expected)
            assert all(np.array_equal(documents[n], expected[n]) for n in range(len(expected)))
    assert find_problems(manifest) == []
    assert not (tmp_path / "a" / "units").exists()
    assert index_size(manifest.shards[0].documents) == manifest.shards[0].idx_bytes


@pytest.mark.distributed
def test_the_same_bytes_for_any_workers_and_tasks(workshop: Workshop, tmp_path: Path) -> None:
    files = find_inputs([workshop.corpus]).files
    tokenize(files, workshop.model, tmp_path / "a", SMALL, 1, quiet)
    tokenize(files, workshop.model, tmp_path / "b", SMALL, 3, quiet)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    for index in (2, 0, 1):
        make_task(files, workshop.model, tmp_path / "c", SMALL, 1, quiet, Task(index, 3))
    merge_manifests(tmp_path / "c", workers=2)
    assert contents(tmp_path / "a") == contents(tmp_path / "c")


class EndedError(Exception):
    """Stands for a kill -9 while shards are being made: nothing is cleaned up after it."""


@pytest.mark.distributed
@pytest.mark.parametrize("after", [1, 5, 12])
def test_joining_goes_on_where_it_was_interrupted(
    workshop: Workshop, tmp_path: Path, after: int
) -> None:
    files, out = find_inputs([workshop.corpus]).files, tmp_path / "out"
    tokenize(files, workshop.model, tmp_path / "whole", SMALL, 1, quiet)
    make_task(files, workshop.model, out, SMALL, 1, quiet, Task(0, 2))
    make_task(files, workshop.model, tmp_path / "half", SMALL, 1, quiet, Task(1, 2))
    shutil.copytree(tmp_path / "half", out, dirs_exist_ok=True)
    parts = 0

    def end(progress: Progress) -> None:
        nonlocal parts
        parts += progress.joined_tokens > 0
        if parts == after:
            raise EndedError

    _, units = read_plan(out)
    with pytest.raises(EndedError):
        Assembler(units, [read_record(unit) for unit in units], 1, end).make_shards()
    assert not (out / "manifest.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    _, made = tokenize(files, workshop.model, out, SMALL, 1, quiet)
    assert made == 0  # ids that have become shards are not made again, and no others are lost
    assert contents(out) == contents(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.mark.distributed
def test_damaged_ids_of_a_unit_do_not_become_a_shard(workshop: Workshop, tmp_path: Path) -> None:
    files, out = find_inputs([workshop.corpus]).files, tmp_path / "out"
    for index in range(2):
        make_task(files, workshop.model, tmp_path / str(index), SMALL, 1, quiet, Task(index, 2))
        shutil.copytree(tmp_path / str(index), out, dirs_exist_ok=True)
    path = out / "units" / "small_00002.ids"
    size = path.stat().st_size
    for at in (10, size // 2, size - 5):  # an id, another id or a length, a run
        copy = Path(shutil.copytree(out, tmp_path / f"damaged {at}"))
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        (copy / "units" / path.name).write_bytes(content)
        with pytest.raises(DataError, match=r"small_00002\.ids is damaged: .* checksum"):
            merge_manifests(copy)
    path.unlink()
    _, made = tokenize(files, workshop.model, out, SMALL, 1, quiet)
    assert made == 1
    tokenize(files, workshop.model, tmp_path / "whole", SMALL, 1, quiet)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.fixture
def finished(workshop: Workshop, tmp_path: Path) -> Path:
    """A finished directory to damage."""
    return Path(shutil.copytree(workshop.shards, tmp_path / "out"))


def tokenize_command(workshop: Workshop, out: Path) -> list[str | Path]:
    """The command that made the workshop's shards."""
    return [
        "tokenize",
        workshop.corpus,
        "--tokenizer",
        workshop.model,
        "--out",
        out,
        "--name",
        "small",
    ]


@pytest.mark.parametrize("ending", ["bin", pytest.param("idx", marks=pytest.mark.distributed)])
@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_a_finished_directory_with_damage_is_named_and_made_again_as_the_remedy_says(
    workshop: Workshop, finished: Path, monkeypatch: pytest.MonkeyPatch, ending: str, damage: str
) -> None:
    path = finished / f"{read_manifest(finished).shards[1].name}.{ending}"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.unlink()
    if damage != "lose":
        path.write_bytes(content if damage == "flip" else content[:-1])
    command = tokenize_command(workshop, finished)
    if (ending, damage) == ("bin", "flip"):  # which large files show only when they are hashed
        monkeypatch.setattr(manifest, "SMALL_BYTES", 0)
        assert "already up to date" in run(*command).out
    sentence = run(*command, "--verify").sentence()
    assert str(path) in sentence and f"`python -m data_pipeline verify {finished}`" in sentence
    told = run("verify", finished).sentence()
    assert (
        str(path) in told
        and f"or delete {finished} and run the same tokenize command again" in told
    )
    shutil.rmtree(finished)
    assert run(*command).code == 0
    assert contents(finished) == contents(workshop.shards)
    assert "already up to date" in run(*command, "--verify").out


@pytest.mark.parametrize("name", ["plan.json", "location.json", "manifest.json"])
def test_a_flipped_bit_in_what_describes_the_shards_is_found(
    workshop: Workshop, finished: Path, name: str
) -> None:
    out = finished
    whole = (out / name).read_bytes()
    command = tokenize_command(workshop, out)
    for at in {len(whole) // 7, len(whole) // 3, len(whole) * 2 // 3}:
        content = bytearray(whole)
        content[at] ^= 1
        (out / name).write_bytes(content)
        sentence = (run("verify", out) if name != "plan.json" else run(*command)).sentence()
        assert name in sentence
    (out / name).unlink()
    if name == "plan.json":  # its remedy is to delete the directory
        assert f"or delete {out} and run the same tokenize command again" in sentence
        assert f"plan.json is missing; restore it, or delete {out} and" in run(*command).sentence()
        shutil.rmtree(out)
    assert run(*command).code == 0
    assert contents(out) == contents(workshop.shards)


def test_a_flipped_bit_in_a_units_record_or_rejects_is_found(
    workshop: Workshop, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "fine"}\n' * 300 + "{bad\n")
    files, out = find_inputs([tmp_path / "in.jsonl"]).files, tmp_path / "out"
    options = TokenizeOptions("x", range_bytes=3000)
    made, units = tokenize(files, workshop.model, tmp_path / "whole", options, 1, quiet)
    make_task(files, workshop.model, out, options, 1, quiet, Task(0, units))
    record = out / "units" / "x_00000.json"
    record.write_bytes(record.read_bytes().replace(b'"documents": ', b'"documents": 1', 1))
    with pytest.raises(DataError, match=r"x_00000\.json is damaged"):
        tokenize(files, workshop.model, out, options, 1, quiet)
    record.unlink()
    make_task(files, workshop.model, out, options, 1, quiet, Task(units - 1, units))
    rejects = out / "units" / f"x_{units - 1:05d}.rejects.jsonl"
    rejects.write_bytes(rejects.read_bytes().replace(b"bad_json", b"bad_jsom"))
    tokenize(files, workshop.model, out, options, 1, quiet)
    assert contents(out) == contents(tmp_path / "whole")
    rejects = out / "rejects.jsonl"
    rejects.write_bytes(rejects.read_bytes().replace(b"bad_json", b"bad_jsom"))
    assert f"{rejects} is not as the manifest says" in run("verify", out).sentence()
    with pytest.raises(DataError, match=r"rejects\.jsonl is not as the manifest says; .*verify"):
        tokenize(files, workshop.model, out, options, 1, quiet)
    shutil.rmtree(out)
    tokenize(files, workshop.model, out, options, 1, quiet)
    assert contents(out) == contents(tmp_path / "whole") and made.rejects == {"bad_json": 1}


def test_what_a_run_leaves_that_ends_after_its_manifest_is_removed(
    workshop: Workshop, finished: Path
) -> None:
    (finished / "units").mkdir()
    (finished / "units" / "small_00000.json").write_text("{}")
    (finished / "small-train-PydocTopics_00000.bin.host-1.tmp").write_bytes(b"x")
    assert "already up to date" in run(*tokenize_command(workshop, finished)).out
    assert contents(finished) == contents(workshop.shards)


def test_a_directory_of_an_older_version_is_refused_with_the_remedy(
    workshop: Workshop, finished: Path
) -> None:
    """Format 2 had one shard for every unit, split and source, and no checksums."""
    (finished / "manifest.json").write_bytes(to_json({"format_version": 2}))
    remedy = "tokenise again into a new directory"
    sentence = run("verify", finished).sentence()
    assert (
        "manifest.json has format version 2, this program reads 3" in sentence
        and remedy in sentence
    )
    (finished / "plan.json").write_bytes(to_json({"format_version": 2}))
    sentence = run(*tokenize_command(workshop, finished)).sentence()
    assert "plan.json is of another version of this program" in sentence and remedy in sentence
    assert run("merge-manifests", finished).sentence() == sentence
