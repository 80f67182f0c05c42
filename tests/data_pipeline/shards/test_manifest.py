"""The manifest, and damage: its file named, by `verify` and by the check at start."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest, check_shards, read_manifest, write_manifest
from data_pipeline.shards.verify import find_problems, refuse_tokenizer
from data_pipeline.tokenizer.tokenizer import identify
from tests.data_pipeline.helpers import Workshop, change_checked, run


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap_index(path: Path) -> None:
    """Another shard's index: of the same size if there is one."""
    size = path.stat().st_size
    others = [p for p in path.parent.glob("*.idx") if p.read_bytes() != path.read_bytes()]
    shutil.copy(min(others, key=lambda p: abs(p.stat().st_size - size)), path)


Damage = Callable[[Path], None]
# tests/fuzz/test_shard_files.py has the flips and cuts.
FAULTS = [(".bin", Path.unlink), (".idx", swap_index)]


@pytest.mark.parametrize(("ending", "damage"), FAULTS)
def test_damage_is_named_by_both_checks(shards: Path, ending: str, damage: Damage) -> None:
    manifest = read_manifest(shards)
    path = Path(f"{manifest.prefix(manifest.shards[5])}{ending}")
    damage(path)
    problems = find_problems(manifest)
    assert len(problems) == 1 and problems[0].startswith(str(path))
    with pytest.raises(DataError, match=path.name.replace(".", r"\.")):
        check_shards(manifest)


def test_a_foreign_tokenizer_is_named(shards: Path, tmp_path: Path) -> None:
    manifest = read_manifest(shards)
    other = tmp_path / "other.model"
    other.write_bytes(b"another")
    said = f"{other} is not the tokenizer of {shards}, {manifest.tokenizer.file}; give that one"
    with pytest.raises(DataError, match=said):
        refuse_tokenizer(manifest, other)
    shutil.copy(other, shards / "tokenizer.model")
    assert find_problems(manifest)[0].startswith(str(shards / "tokenizer.model"))
    with pytest.raises(DataError, match=r"tokenizer\.model does not have the SHA-256"):
        check_shards(manifest)


def test_a_manifest_of_another_tokenizer_is_named(shards: Path, other_model: Path) -> None:
    # The manifest that the same corpus has under another tokenizer: it agrees with itself.
    identity = identify(other_model)
    write_manifest(dataclasses.replace(read_manifest(shards), tokenizer=identity))
    manifest = read_manifest(shards)
    assert manifest.tokenizer.sha256 == identity.sha256
    assert find_problems(manifest) == [
        f"{shards / 'tokenizer.model'} does not have the SHA-256 that the manifest says"
    ]
    with pytest.raises(DataError, match=r"tokenizer\.model does not have the SHA-256"):
        check_shards(manifest)
    # With that tokenizer's model beside it the hashes agree; its ids do not.
    shutil.copy(other_model, shards / "tokenizer.model")
    assert any("do not cover" in problem for problem in find_problems(manifest))


def test_a_file_the_manifest_does_not_know_is_named(shards: Path) -> None:
    shutil.copy(next(shards.glob("*_00000.bin")), shards / "stray_00001.bin")
    assert find_problems(read_manifest(shards)) == [
        f"{shards / 'stray_00001.bin'} is not in the manifest"
    ]


def test_counts_that_do_not_match_the_files(shards: Path) -> None:
    # A manifest whose sums agree with themselves, but not with the shard: opening the shard tells.
    def change(value: dict) -> None:  # type: ignore[type-arg]
        shard = value["shards"][0]
        shard["tokens"] -= 1
        value["totals"][shard["split"]][shard["source"]]["tokens"] -= 1

    change_checked(shards / "manifest.json", change)
    manifest = read_manifest(shards)
    (problem,) = find_problems(manifest)
    assert problem.startswith(str(manifest.prefix(manifest.shards[0])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(format_version=99), "format version 99"),
        (lambda value: value.pop("tokenizer"), "has no key 'tokenizer'"),
        (lambda value: value.update(dtype=3), "'dtype': input should be a valid string"),
        (lambda value: value.update(dtype="\ud800"), "'dtype': input should be a valid string"),
        (lambda value: value.update(dtype="int64"), "'dtype': string should match"),
        (lambda value: value.update(tokenizer=[]), "'tokenizer': input should be a dictionary"),
        (lambda value: value.update(shards=5), "'shards': input should be a valid tuple"),
        (lambda value: value["shards"][0].update(name="../x"), "'shards.0.name': it leads out of"),
        (lambda value: value["rejects"].update({"\n": -1}), r"'rejects.\\n': input should be g"),
        (lambda value: value.update(fingerprint=None), "contradicts itself"),
        (lambda value: value["shards"][0].update(tokens="12"), "'shards.0.tokens': input should"),
        (lambda value: value["inputs"][0].pop("size"), "has no key 'inputs.0.size'"),
        (lambda value: value["shards"][0].update(tokens=12), "contradicts itself"),
        (lambda value: value["shards"][0].update(unit_documents=[1]), "contradicts itself"),
        (lambda value: value["shards"][0]["units"].append(1), "contradicts itself"),
        (lambda value: value["shards"].pop(), "contradicts itself"),
    ],
)
def test_manifests_that_cannot_be_right(
    shards: Path, change: Callable[[dict], None], message: str
) -> None:  # type: ignore[type-arg]
    change_checked(shards / "manifest.json", change)
    with pytest.raises(DataError, match=message):
        read_manifest(shards)


def test_missing_directory_and_unfinished_directory(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent does not exist; make it with"):
        read_manifest(tmp_path / "absent")
    (shards / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        read_manifest(shards)
    (shards / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json is not valid JSON"):
        read_manifest(shards)


def test_queries_and_fingerprint(workshop: Workshop, tmp_path: Path) -> None:
    manifest = read_manifest(workshop.shards)
    sources = ["PydocTopics", "StdlibComments", "StdlibDocstrings"]
    assert manifest.sources("train") == manifest.sources("validation") == sources
    assert sum(manifest.tokens("train", source) for source in sources) == manifest.tokens("train")
    assert {shard.source for shard in manifest.shards_of("train", sources[0])} == {sources[0]}
    with pytest.raises(DataError, match="split 'dev' is unknown"):
        manifest.tokens("dev")
    moved: Manifest = read_manifest(Path(shutil.copytree(workshop.shards, tmp_path / "moved")))
    part, _ = workshop.tokenize(tmp_path / "part", files=slice(0, 7))
    assert moved.fingerprint == manifest.fingerprint != part.fingerprint
    check_shards(moved)


def test_the_command_verify(shards: Path, workshop: Workshop) -> None:
    good = run("verify", shards, "--tokenizer", workshop.model)
    assert (good.code, good.err) == (0, "")
    assert "all as the manifest says" in good.out and "4 units are as in the source" in good.out
    damaged = shards / f"{read_manifest(shards).shards[0].name}.bin"
    flip(damaged)
    sentence = run("verify", shards).sentence()
    assert str(damaged) in sentence and "SHA-256" in sentence
