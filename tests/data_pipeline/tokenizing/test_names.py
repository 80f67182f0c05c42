"""Names of sources become file names: nothing collides; what is written is not read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.shards.blend import Member, make_blend
from data_pipeline.shards.verify import find_problems
from data_pipeline.shards.writing import shard_name
from data_pipeline.tokenizing.rejects import Limits
from tests.data_pipeline.helpers import Workshop, run
from tests.data_pipeline.tokenizing.test_tokenize import texts_of

# With 10,000 it passes too, and takes the disk a minute or more of fsync.
SOURCES = 100
PLAIN = ["C", "C++", "C#", "a b", "a/b", "数据", "数学", "..", "-", "\n", "web"]
NAMES = [*PLAIN, "x" * 300, "x" * 299, "Ω" * 80]


def write(path: Path, sources: list[str]) -> Path:
    records = [{"text": f"of {s}", "meta": {"redpajama_set_name": s}} for s in sources]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_no_two_names_share_a_file(workshop: Workshop, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", NAMES)
    manifest, _ = workshop.tokenize(tmp_path / "out", path, validation_fraction=0)
    text_by_source = {source: texts[0] for (_, source), texts in texts_of(manifest).items()}
    assert text_by_source == {name: f"of {name}" for name in NAMES}
    assert max(len(path.name) for path in (tmp_path / "out").iterdir()) < 100
    assert find_problems(manifest) == []
    # Names that need no hash have none, and no name can look as if it had one.
    assert shard_name("x", "train", "web", 3) == "x-train-web_00003"


def test_names_that_differ_in_capitals_only_have_files_that_differ_in_more(
    workshop: Workshop, tmp_path: Path
) -> None:
    names = ["Wiki", "wiki", "WIKI", "books"]
    path = write(tmp_path / "in.jsonl", names)
    manifest, _ = workshop.tokenize(tmp_path / "out", path, validation_fraction=0)
    files = {shard.source: shard.name for shard in manifest.shards}
    assert {*files} == {*names} and len({name.casefold() for name in files.values()}) == len(names)
    # The first in the alphabet keeps its name, and so does one that is alone.
    assert (files["WIKI"], files["books"]) == ("small-train-WIKI_00000", "small-train-books_00000")


@pytest.mark.distributed
def test_many_sources_keep_no_descriptors(workshop: Workshop, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [f"site {number}" for number in range(SOURCES)])
    descriptor_count = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    manifest, _ = workshop.tokenize(tmp_path / "out", path, validation_fraction=0)
    assert len(manifest.shards) == SOURCES == len(set(manifest.sources("train")))
    weights = dict.fromkeys(manifest.sources("train"), 1)
    for members in ([Member(manifest)], [Member(manifest, 1, weights)]):
        samples = make_blend(members).training_samples(4, 1, tmp_path / "cache")
        samples.prepare(0)
        samples.blocks(np.arange(SOURCES))  # shards of every part are read
    assert not descriptor_count or len(os.listdir("/proc/self/fd")) <= descriptor_count + 5


@pytest.mark.parametrize(
    ("option", "wrong", "right", "said"),
    [
        (
            "--exclude-source",
            "Boks",
            "Books",
            "--exclude-source 'Boks': no document is of that source; there are Books, Web",
        ),
        (
            "--source-key",
            "meta.set",
            "meta.redpajama_set_name",
            "--source-key 'meta.set': no record names its source there, so all are of default",
        ),
    ],
)
def test_a_name_of_a_source_or_of_its_key_that_there_is_not_is_said(
    workshop: Workshop, tmp_path: Path, option: str, wrong: str, right: str, said: str
) -> None:
    path = write(tmp_path / "in.jsonl", ["Books", "Web"])
    for name, expected in ((wrong, True), (right, False)):
        done = run(*workshop.command(tmp_path / name, option, name, corpus=path))
        assert done.code == 0 and (said in done.out) == expected


def test_out_inside_the_input_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    write(root / "in.jsonl", ["Books"])
    (tmp_path / "link").symlink_to(root)
    for out in (root / "out", root, tmp_path / "link" / "deep" / "out"):
        sentence = run(*workshop.command(out, corpus=root)).sentence()
        assert f"--out {out} lies inside the input directory {root}" in sentence
    assert sorted(path.name for path in root.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"\\ud800"', '{"deep": ["\\udc00"]}'])
def test_oddities_outside_the_text_do_not_cost_the_document(
    workshop: Workshop, tmp_path: Path, value: str
) -> None:
    good = f'{{"text": "fine", "score": {value}}}\n'
    bad = '{"text": "half a pair: \\udc00"}\n'
    path = tmp_path / "in.jsonl"
    path.write_text(good * 3 + bad)
    limits = Limits(max_reject_rate=1)
    manifest, _ = workshop.tokenize(tmp_path / "out", path, limits=limits, validation_fraction=0)
    assert texts_of(manifest)["train", "default"] == ["fine"] * 3
    assert manifest.unusual == {"not_strict_json": 3} and manifest.rejects == {"lone_surrogate": 1}
