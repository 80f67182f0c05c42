"""Shards are whole units up to a size: the same bytes, however that is cut and interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data_pipeline.errors import DataError
from data_pipeline.io.files import to_json
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.verify import find_problems
from data_pipeline.shards.writing import index_size
from data_pipeline.tokenizing.run import finish
from tests.data_pipeline.helpers import Workshop, contents, run

SMALL = {"shard_bytes": 150_000}


@pytest.fixture(scope="module")
def whole(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small shards, made without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    workshop.tokenize(out, **SMALL)
    return out


def test_shards_are_whole_units_up_to_a_size(workshop: Workshop, whole: Path) -> None:
    manifest = read_manifest(whole)
    large = read_manifest(workshop.shards)
    assert len(large.shards) == 6 and len(manifest.shards) > 10
    for split in ("train", "validation"):
        for source in manifest.sources(split):
            shards = manifest.shards_of(split, source)
            assert [shard.number for shard in shards] == list(range(len(shards)))
            units = [unit for shard in shards for unit in shard.units]
            assert units == sorted(set(units))  # a unit is in one shard of a source
            assert all(sum(s.unit_documents) == s.documents for s in shards)
            for shard in shards:
                size = shard.bin_bytes + shard.idx_bytes
                assert size <= SMALL["shard_bytes"] or len(shard.units) == 1
            # One after the other they are the one large shard, as megatron-core reads it.
            (large_shard,) = large.shards_of(split, source)
            read = [IndexedDataset(str(manifest.prefix(shard))) for shard in shards]
            expected = IndexedDataset(str(large.prefix(large_shard)))
            documents = [dataset[number] for dataset in read for number in range(len(dataset))]
            assert len(documents) == len(expected)
            assert all(np.array_equal(documents[n], expected[n]) for n in range(len(expected)))
    assert find_problems(manifest) == []
    assert not (whole / "units").exists()
    assert index_size(manifest.shards[0].documents) == manifest.shards[0].idx_bytes


class EndedError(Exception):
    """Stands for a kill -9 while shards are being made: nothing is cleaned up after it."""


@pytest.mark.distributed
def test_joining_continues_where_it_was_interrupted(
    workshop: Workshop, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    workshop.make_tasks(out, 2, **SMALL)
    for parts in (1, 5, 12):
        left = iter(range(parts))

        def end(progress: Progress, left: Iterator[int] = left) -> None:
            if progress.joined_tokens and next(left, None) is None:
                raise EndedError

        with pytest.raises(EndedError):
            finish(out, report=end)
        assert not (out / "manifest.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    _, unit_count = workshop.tokenize(out, **SMALL)
    assert unit_count == 0  # the units are kept until the manifest is there
    assert contents(out) == contents(whole)
    assert finished and {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.mark.distributed
def test_damaged_ids_of_a_unit_do_not_become_a_shard(
    workshop: Workshop, whole: Path, tmp_path: Path
) -> None:
    """Flip a bit of an id, of another id or a length, of a run; then lose the file."""
    out = tmp_path / "out"
    workshop.make_tasks(out, 2, **SMALL)
    path = out / "units" / "small_00002.ids"
    size = path.stat().st_size
    for at in (10, size // 2, size - 5):
        copy = Path(shutil.copytree(out, tmp_path / f"damaged {at}"))
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        (copy / "units" / path.name).write_bytes(content)
        with pytest.raises(DataError, match=r"small_00002\.ids is damaged: .* checksum"):
            finish(copy)
    path.unlink()
    _, unit_count = workshop.tokenize(out, **SMALL)
    assert unit_count == 1
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_finished_directory_with_damage_is_named_with_the_remedy(
    workshop: Workshop, shards: Path, ending: str
) -> None:
    """tests/fuzz/test_shard_files.py has any damage."""
    path = shards / f"{read_manifest(shards).shards[1].name}.{ending}"
    path.write_bytes(path.read_bytes()[:-1])
    sentence = run(*workshop.command(shards)).sentence()
    assert str(path) in sentence and f"`python -m data_pipeline verify {shards}`" in sentence
    told = run("verify", shards).sentence()
    assert str(path) in told
    assert f"or delete {shards} and run the same tokenize command again" in told


@pytest.mark.parametrize("name", ["plan.json", "location.json", "manifest.json"])
def test_a_flipped_bit_in_what_describes_the_shards_is_found(
    workshop: Workshop, shards: Path, name: str
) -> None:
    out = shards
    content = bytearray((out / name).read_bytes())
    command = workshop.command(out)
    content[len(content) // 3] ^= 1
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
    root = tmp_path / "in"
    root.mkdir()
    (root / "0.jsonl").write_text('{"text": "fine"}\n' * 100)
    (root / "1.jsonl").write_text('{"text": "fine"}\n' * 200 + "{bad\n")
    out = tmp_path / "out"
    manifest, _ = workshop.tokenize(tmp_path / "whole", root)
    workshop.make_tasks(out, 2, 0, inputs=[root])
    record = out / "units" / "small_00000.json"
    record.write_bytes(record.read_bytes().replace(b'"documents": ', b'"documents": 1', 1))
    with pytest.raises(DataError, match=r"small_00000\.json is damaged"):
        workshop.tokenize(out, root)
    record.unlink()
    workshop.make_tasks(out, 2, 1, inputs=[root])
    for relative_path in ("units/small_00001.rejects.jsonl", "rejects.jsonl"):
        rejects = out / relative_path
        rejects.write_bytes(rejects.read_bytes().replace(b"bad_json", b"bad_jsom"))
        if relative_path == "rejects.jsonl":  # a finished directory is not fixed
            assert f"{rejects} is not as the manifest says" in run("verify", out).sentence()
            message = r"rejects\.jsonl is not as the manifest says; .*verify"
            with pytest.raises(DataError, match=message):
                workshop.tokenize(out, root)
            shutil.rmtree(out)
        workshop.tokenize(out, root)
        assert contents(out) == contents(tmp_path / "whole")
    assert manifest.rejects == {"bad_json": 1}


def test_what_a_run_leaves_that_ends_after_its_manifest_is_removed(
    workshop: Workshop, shards: Path
) -> None:
    (shards / "units").mkdir()
    (shards / "units" / "small_00000.json").write_text("{}")
    (shards / "small-train-PydocTopics_00000.bin.host-1.tmp").write_bytes(b"x")
    assert "already up to date" in run(*workshop.command(shards)).out
    assert contents(shards) == contents(workshop.shards)


def test_a_directory_of_an_older_version_is_refused_with_the_remedy(
    workshop: Workshop, shards: Path
) -> None:
    """Format 2 had one shard for every unit, split and source, and no checksums."""
    (shards / "manifest.json").write_bytes(to_json({"format_version": 2}))
    remedy = "tokenise again into a new directory"
    sentence = run("verify", shards).sentence()
    assert "manifest.json has format version 2, this program reads 3" in sentence
    assert remedy in sentence
    (shards / "plan.json").write_bytes(to_json({"format_version": 2}))
    sentence = run(*workshop.command(shards)).sentence()
    assert "plan.json is of another version of this program" in sentence and remedy in sentence
    assert run("merge-manifests", shards).sentence() == sentence
