"""Results on disk: found by what they were made of, made again where that or the file is
another."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from laboratory.study.cache import ResultCache, content_digest
from pretrain.errors import UserError

IDENTITY = {"model": "a", "seed": 1}
FORM = TypeAdapter(TypedDict("Result", {"score": float}))


def test_a_result_is_made_once(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path / "trials", FORM)
    calls = []

    def make() -> dict[str, float]:
        calls.append(1)
        return {"score": 0.5, "loss": math.nan}

    made, kept = cache.read_or_make("one", IDENTITY, make)
    assert made == {"identity": IDENTITY, "score": 0.5, "loss": None} and not kept
    assert cache.read_or_make("one", IDENTITY, make) == (made, True) and len(calls) == 1
    assert json.loads((tmp_path / "trials/one.json").read_text()) == made
    assert cache.read("one", {**IDENTITY, "seed": 2}) is None
    assert cache.read("two", IDENTITY) is None
    path = tmp_path / "trials/one.json"
    nameless = '{"identity": {"model": "a", "seed": 1}, "score": "0.5"}'
    for text in (path.read_text()[:30], "[]", "{}", '"identity"', nameless):
        path.write_text(text)
        assert cache.read("one", IDENTITY) is None
    assert cache.read_or_make("one", IDENTITY, make) == (made, False) and len(calls) == 2


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out: .*file/one.json cannot be written"):
        ResultCache(tmp_path / "file", FORM).write("one", IDENTITY, {})


def test_digests_tell_contents_apart() -> None:
    assert content_digest([["a", 1]]) == content_digest([("a", 1)]) != content_digest([["a", 2]])
