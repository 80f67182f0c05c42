"""Files of seals: their hashes, and what is not a seal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laboratory.study.seal import Seal, read_seals, write_seal
from pretrain.config.removed import LAST_WITH_THEM, REMOVED_KEYS, Removed
from pretrain.errors import UserError
from pretrain.runs.seals import content_digest
from tests.fabricated_seals import made_seal


def a_seal(directory: Path) -> Seal:
    """Write a seal of runs that are not there."""
    content = made_seal(5).sealed.model_dump(exclude={"commit", "sealed", "predictions"})
    content["hypotheses"] = [
        {"design": "new", "question": "worse", "margin": 2.0, "baseline": "old"}
    ]
    seal = write_seal(directory, content, [])
    assert seal is not None
    return seal


def fifo(path: Path, _: str) -> None:
    os.mkfifo(path)


def dangling(path: Path, _: str) -> None:
    path.symlink_to(path.with_name("gone"))


def device(path: Path, _: str) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path, _: str) -> None:
    with path.open("wb") as file:
        file.truncate((1 << 24) + 1)


def folder(path: Path, _: str) -> None:
    path.mkdir()


def key_twice(path: Path, text: str) -> None:
    path.write_text(text.replace('"sealed": {', '"sealed": {"fixed_n": true,', 1))


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, str], None]:
    """Leave the seal with its content changed, under a hash that is right."""

    def write(path: Path, text: str) -> None:
        content = json.loads(text)
        change(content["sealed"])
        content["sha256"] = content_digest(content["sealed"])
        path.write_text(json.dumps(content))

    return write


def set_(key: str, value: Any) -> Callable[[Path, str], None]:
    return edited(lambda sealed: sealed.update({key: value}))


def raw(content: bytes) -> Callable[[Path, str], None]:
    def write(path: Path, _: str) -> None:
        path.write_bytes(content)

    return write


STRANGE: list[tuple[Callable[[Path, str], None], str]] = [
    (fifo, "not a regular file"),
    (device, "not a regular file"),
    (folder, "not a regular file"),
    (dangling, "(No such file"),
    (huge, "16,777,217 bytes"),
    (raw(b""), "EOF"),
    (raw(b"{}"), "sealed: Field required"),
    (raw(b"[" * 100_000), "recursion"),
    (raw(b"\xff\xfe\x00"), "JSON"),
    (edited(lambda sealed: sealed.pop("grid")), "sealed.grid: Field required"),
    (set_("seeds", []), "sealed.seeds"),
    (set_("seeds", [*range(10_001)]), "sealed.seeds"),
    (set_("seeds", [1, 1]), "a seed stands there twice"),
    (set_("seeds", [10**30]), "sealed.seeds.0"),
    (set_("settings", {}), "there are no settings of new"),
    (set_("grid", {"file": "g" * 4097, "sha256": ""}), "sealed.grid.file"),
    (set_("sealed", "yesterday"), "does not match format"),
    (set_("measure", {"match": "luck", "subjects": [], "rule": {}}), "sealed.measure.match"),
    (edited(lambda sealed: sealed["hypotheses"][0].update(question="equal")), "a question is one"),
    (key_twice, "the key 'fixed_n' twice"),
]


@pytest.mark.parametrize(("make", "told"), STRANGE)
def test_a_strange_file_is_one_sentence_and_leaves_the_others(
    make: Callable[[Path, str], None], told: str, tmp_path: Path
) -> None:
    seal = a_seal(tmp_path)
    path = seal.path.with_name("strange.json")
    make(path, seal.path.read_text())
    read = read_seals([tmp_path])
    (problem,) = read.problems
    assert problem.startswith(f"{path} is not a valid seal file (") and told in problem
    assert problem.isprintable() and len(problem) < 500
    assert [stored.path for stored in read.seals] == [seal.path] and read.seals[0].intact


def test_the_hash_is_of_the_content_and_in_the_name(tmp_path: Path) -> None:
    seal = a_seal(tmp_path)
    copy = seal.path.with_name("-copy.json")  # before any hash
    content = json.loads(seal.path.read_text())
    copy.write_text(json.dumps(content))
    content["sealed"] = dict(reversed(content["sealed"].items()))
    seal.path.write_text(json.dumps(content))
    assert {stored.path: stored.intact for stored in read_seals([tmp_path]).seals} == {
        copy: False,
        seal.path: True,
    }
    written = seal.path.stat()
    assert a_seal(tmp_path).path == seal.path and seal.path.stat() == written  # not the copy


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (edited(lambda sealed: sealed.pop("measure")), "it does not state its measure and seeds"),
        (edited(lambda sealed: sealed.pop("other_seeds")), "as seals of version 0.4 and before"),
        (set_("predictions", [{"design": "new"}]), "it has predictions of `ladder`, which"),
    ],
)
def test_a_seal_of_a_form_that_is_gone_is_one_sentence_with_the_tag(
    make: Callable[[Path, str], None], why: str, tmp_path: Path
) -> None:
    seal = a_seal(tmp_path)
    make(seal.path, seal.path.read_text())
    read = read_seals([tmp_path])
    (problem,) = read.problems
    assert read.seals == () and problem.startswith(f"the seal {seal.path} is not judged: it ")
    assert why in problem and "tag v0.5-lab" in problem and problem.isprintable()


def test_settings_that_are_gone_count_where_they_changed_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REMOVED_KEYS, "model.gone", Removed("leave it out", neutral=(False,)))
    path = a_seal(tmp_path).path
    content = json.loads(path.read_text())
    content["sealed"]["settings"]["new"]["model.gone"] = False
    path.write_text(json.dumps(content))
    (seal,) = read_seals([tmp_path]).seals
    assert "model.gone" not in seal.sealed.settings["new"]
    content["sealed"]["settings"]["new"]["model.gone"] = True
    path.write_text(json.dumps(content))
    (problem,) = read_seals([tmp_path]).problems
    assert problem == (
        f"the seal {path} is not judged: model.gone was removed; {LAST_WITH_THEM} has it: "
        "leave it out"
    )


@pytest.mark.parametrize("make", [fifo, dangling, raw(b"")])
def test_a_folder_of_seals_that_is_none(make: Callable[[Path, str], None], tmp_path: Path) -> None:
    make(tmp_path / "seals", "")
    later = a_seal(tmp_path / "later")
    read = read_seals([tmp_path, tmp_path, tmp_path / "none", tmp_path / "later"])
    (problem,) = read.problems
    assert read.seals == (later,) and problem.startswith(f"{tmp_path / 'seals'} is not a valid")
    with pytest.raises(UserError, match=r"seals/\w{12}\.json cannot be written \(\w"):
        a_seal(tmp_path)


@pytest.mark.parametrize("grid", ["g" * 4000, "nul\0", "/dev/zero", "gone.yaml"])
def test_a_grid_file_of_any_name_is_at_most_gone(grid: str, tmp_path: Path) -> None:
    seal = a_seal(tmp_path)
    content = json.loads(seal.path.read_text())
    content["sealed"]["grid"]["file"] = grid
    seal.path.write_text(json.dumps(content))
    (read,) = read_seals([tmp_path]).seals
    assert not read.intact
    assert "has changed or is gone" in " ".join(read.notes({}))
