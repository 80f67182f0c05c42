"""Results on disk: found by what they were made of, made again where that or the file is
another."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from laboratory.study.cache import content_digest, read_or_make, read_result
from pretrain.errors import UserError

IDENTITY = {"model": "a", "seed": 1}
FORM = TypeAdapter(TypedDict("Result", {"score": float}))


def test_a_result_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "trials/one.json"
    calls = []

    def make() -> dict[str, float]:
        calls.append(1)
        return {"score": 0.5, "loss": math.nan}

    result = {"score": 0.5}
    assert read_or_make(path, IDENTITY, FORM, make) == (result, False)
    assert read_or_make(path, IDENTITY, FORM, make) == (result, True) and len(calls) == 1
    assert json.loads(path.read_text()) == {"identity": IDENTITY, "loss": None, **result}
    assert read_result(path, {**IDENTITY, "seed": 2}, FORM) is None
    assert read_result(tmp_path / "trials/two.json", IDENTITY, FORM) is None
    nameless = '{"identity": {"model": "a", "seed": 1}, "score": "0.5"}'
    for text in (path.read_text()[:30], "[]", "{}", '"identity"', nameless):
        path.write_text(text)
        assert read_result(path, IDENTITY, FORM) is None
    assert read_or_make(path, IDENTITY, FORM, make) == (result, False) and len(calls) == 2


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out: .*file/one.json cannot be written"):
        read_or_make(tmp_path / "file/one.json", IDENTITY, FORM, dict)


def test_digests_tell_contents_apart() -> None:
    assert content_digest([["a", 1]]) == content_digest([("a", 1)]) != content_digest([["a", 2]])
