"""Shards, and notes with a checksum, after damage."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.io.files import read_checked_json, to_checked_json
from data_pipeline.shards.manifest import Manifest, check_shards, write_manifest
from data_pipeline.shards.reading import ShardPool, lengths_of, open_shard
from data_pipeline.shards.verify import find_problems
from tests.data_pipeline.shards.synthetic import random_shards
from tests.fuzz.damage import REFUSED, damaged, damaged_json, holding, right_or_refused

NOTE = {
    "format_version": 3,
    "units": [{"number": 1, "files": ["a", "b"]}],
    "fraction": 0.05,
    "text": "é\ud800",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Two shards of a few documents, with their true hashes."""
    manifest = random_shards(tmp_path_factory.mktemp("shards") / "directory", 9000, 2)
    true = [
        replace(
            s, bin_sha256=hashlib.sha256(Path(f"{manifest.prefix(s)}.bin").read_bytes()).hexdigest()
        )
        for s in manifest.shards
    ]
    whole = replace(manifest, shards=tuple(true))
    write_manifest(whole)
    return whole


@given(st.data())
def test_shards(shards: Manifest, data: st.DataObject) -> None:
    shard = shards.shards[0]
    path = Path(f"{shards.prefix(shard)}.{data.draw(st.sampled_from(['bin', 'idx']))}")
    content = path.read_bytes()
    changed = data.draw(
        st.one_of(damaged(content), damaged(content[:60]).map(lambda head: head + content[60:]))
    )
    with holding(path, changed):
        checked = right_or_refused(lambda: check_shards(shards))
        assert (checked == REFUSED) == (changed != content)
        if changed != content:
            assert any(problem.startswith(str(path)) for problem in find_problems(shards))
        lengths = right_or_refused(lambda: lengths_of(shards, shard))
        assert lengths is REFUSED or len(lengths) == shard.documents
        opened = right_or_refused(lambda: open_shard(shards, shard))
        assert opened is REFUSED or len(opened.tokens) == shard.tokens
        tokens = right_or_refused(lambda: ShardPool(shards, [shard]).tokens(0))
        assert tokens is REFUSED or len(tokens) == shard.tokens
        if path.suffix == ".bin" and opened is not REFUSED:
            assert np.array_equal(opened.tokens, np.frombuffer(changed, np.uint16))


@pytest.mark.parametrize("length", [9, 17, 18, 33])
def test_an_index_that_ends_in_its_header(shards: Manifest, length: int) -> None:
    path = Path(f"{shards.prefix(shards.shards[0])}.idx")
    refused_in_place_of(path, path.read_bytes()[:length], shards)


@pytest.mark.parametrize("documents", [2**20, 2**62, 2**64 - 1])
def test_an_index_of_more_documents_than_there_are(shards: Manifest, documents: int) -> None:
    path = Path(f"{shards.prefix(shards.shards[0])}.idx")
    content = path.read_bytes()
    refused_in_place_of(path, content[:18] + documents.to_bytes(8, "little") + content[26:], shards)


def refused_in_place_of(path: Path, changed: bytes, shards: Manifest) -> None:
    with holding(path, changed):
        assert right_or_refused(lambda: open_shard(shards, shards.shards[0])) == REFUSED
        assert right_or_refused(lambda: lengths_of(shards, shards.shards[0])) == REFUSED


@given(damaged_json(to_checked_json(NOTE)))
def test_notes_with_a_checksum(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "note.json"
    path.write_bytes(content)
    note = right_or_refused(lambda: read_checked_json(path, "delete it"))
    assert note in (REFUSED, NOTE)
