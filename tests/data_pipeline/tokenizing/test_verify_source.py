"""`verify` against the source text: faults that no hash of the shards can show."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.files import to_checked_json
from data_pipeline.shards.manifest import Manifest, read_manifest, write_manifest
from data_pipeline.shards.verify import find_problems
from data_pipeline.tokenizing.source_check import compare_with_source
from tests.data_pipeline.helpers import Workshop, run


def falsify(directory: Path, at: int = 0) -> Manifest:
    """Swap two words of a shard's first document, and make every hash agree with that."""
    manifest = read_manifest(directory)
    shard = manifest.shards[at]
    path = Path(f"{manifest.prefix(shard)}.bin")
    tokens = np.fromfile(path, dtype=np.uint16)
    first = next(i for i in range(3, len(tokens)) if tokens[i] != tokens[i + 1])
    tokens[[first, first + 1]] = tokens[[first + 1, first]]
    path.write_bytes(tokens.tobytes())
    changed = replace(shard, bin_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    shards = tuple(changed if entry is shard else entry for entry in manifest.shards)
    write_manifest(replace(manifest, shards=shards))
    return read_manifest(directory)


def test_a_text_that_is_not_the_sources_is_found_and_named(shards: Path) -> None:
    manifest = falsify(shards)
    file_problems = [problem for problem in find_problems(manifest) if "same ids" not in problem]
    assert file_problems == []  # every hash and count is right
    problems, _ = compare_with_source(manifest)
    assert len(problems) == 1
    assert problems[0].startswith(
        f"{manifest.prefix(manifest.shards[0])}.bin: document 0 is not a document"
    )


def test_documents_in_the_wrong_split_or_lost_are_found(shards: Path) -> None:
    manifest = read_manifest(shards)
    swapped = {"train": "validation", "validation": "train"}
    wrong = tuple(
        replace(s, split=swapped[s.split]) if 0 in s.units else s for s in manifest.shards
    )
    problems, _ = compare_with_source(replace(manifest, shards=wrong), None, 1)
    assert any("is not a document of this split" in problem for problem in problems)
    fewer = tuple(shard for shard in manifest.shards if shard is not manifest.shards[0])
    problems, _ = compare_with_source(replace(manifest, shards=fewer), None, 1)
    assert any("unit 0 has 0 documents of PydocTopics in train" in problem for problem in problems)


def test_a_plan_of_other_inputs_is_refused(shards: Path) -> None:
    manifest = read_manifest(shards)
    first = manifest.shards[0]
    other = replace(first, units=tuple(99 + number for number in first.units))
    for changes in ({"inputs": manifest.inputs[1:]}, {"shards": (other, *manifest.shards[1:])}):
        with pytest.raises(DataError, match=r"plan\.json and manifest\.json have other inputs"):
            compare_with_source(replace(manifest, **changes))


def test_inputs_that_moved_changed_or_are_gone(
    workshop: Workshop, shards: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(workshop.corpus, tmp_path / "moved"))
    manifest = read_manifest(shards)
    gone = tmp_path / "gone"
    (shards / "location.json").write_bytes(to_checked_json({"inputs": str(gone)}))
    problems, remark = compare_with_source(manifest)
    assert problems == [] and f"the inputs are not at {gone}" in remark
    with pytest.raises(DataError, match=f"{gone} is not the directory of the inputs; the shards"):
        compare_with_source(manifest, gone)
    problems, remark = compare_with_source(manifest, moved, most_units=8)
    assert problems == [] and "documents of 8 units are as in the source text" in remark
    assert int(remark.split()[0]) > 500
    first = min(moved.glob("*.zst"))
    first.write_bytes(first.read_bytes()[::-1])
    sentence = run("verify", shards, "--inputs", moved).sentence()
    assert f"{first} is not what was tokenised; the shards are whole: give --inputs" in sentence


def test_texts_that_the_tokenizer_changes_agree_with_their_source(
    workshop: Workshop, tmp_path: Path
) -> None:
    texts = [json.dumps({"text": f"text {n} \u2581 \u0000 {n * 77}"}) for n in range(400)]
    (tmp_path / "in.jsonl").write_text("\n".join(texts))
    manifest, _ = workshop.tokenize(tmp_path / "out", tmp_path / "in.jsonl")
    problems, remark = compare_with_source(manifest)
    assert problems == [] and "as in the source text" in remark


@pytest.mark.parametrize("by", ["options", "inputs"])
def test_directories_of_earlier_versions_that_took_parts_are_not_compared(
    shards: Path, by: str
) -> None:
    manifest = read_manifest(shards)
    if by == "options":
        manifest = replace(manifest, options=manifest.options | {"max_tokens": 5})
    else:
        first = replace(manifest.inputs[0], end=7)
        manifest = replace(manifest, inputs=(first, *manifest.inputs[1:]))
    problems, remark = compare_with_source(manifest)
    assert problems == [] and "an earlier version took parts of the inputs" in remark
