"""Tokenising: what is in the shards, the same bytes however it is run, and reruns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from data_pipeline.errors import DataError
from data_pipeline.io.files import read_checked_json, to_checked_json
from data_pipeline.shards.manifest import Manifest, read_manifest
from data_pipeline.shards.writing import ShardWriter, dtype_for
from data_pipeline.tokenizer.tokenizer import load_tokenizer
from data_pipeline.tokenizing.plan import PLAN_NAME, Task, at_planned_revision
from data_pipeline.tokenizing.rejects import Limits
from tests.data_pipeline.helpers import Workshop, all_documents, contents, write_documents


def texts_of(manifest: Manifest) -> dict[tuple[str, str], list[str]]:
    """Documents by split and source, as megatron-core reads and the tokenizer decodes them."""
    processor = load_tokenizer(manifest.directory / "tokenizer.model")
    texts: dict[tuple[str, str], list[str]] = {}
    for shard in manifest.shards:
        dataset = IndexedDataset(str(manifest.prefix(shard)))
        assert len(dataset) == shard.documents
        for number in range(len(dataset)):
            ids = dataset[number].tolist()
            assert ids[-1] == manifest.tokenizer.eod_id
            texts.setdefault((shard.split, shard.source), []).append(processor.decode(ids[:-1]))
    return texts


def test_megatron_reads_back_every_document_exactly(workshop: Workshop) -> None:
    manifest = read_manifest(workshop.shards)
    shard_texts = texts_of(manifest)
    expected = all_documents(workshop.corpus)
    for source in ("PydocTopics", "StdlibDocstrings", "StdlibComments"):
        texts = [d.text.replace("\u2581", " ") for d in expected if d.source == source]
        train = shard_texts["train", source]
        validation = shard_texts["validation", source]
        held_out = set(validation)
        # Order is kept within a split, nothing is lost, nothing is on both sides.
        assert train == [text for text in texts if text not in held_out]
        assert validation == [text for text in texts if text in held_out]
        assert 0.01 < len(validation) / len(texts) < 0.12
    assert sum(s.text_bytes for s in manifest.shards) == sum(len(d.text.encode()) for d in expected)
    assert manifest.tokens("train") + manifest.tokens("validation") == sum(
        s.tokens for s in manifest.shards
    )
    assert manifest.dtype == "uint16" and manifest.tokenizer.vocab_size == 1000
    stated = json.loads((workshop.shards / "manifest.json").read_bytes())
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, "eod_id": 2}
    assert stated["tokenizer"] | ids == stated["tokenizer"]
    assert stated["end_of_document"].startswith("every document ends with id 2;")


@pytest.mark.distributed
def test_a_rerun_writes_nothing_and_names_a_lost_shard(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, unit_count = workshop.tokenize(out)
    assert unit_count == 8
    first_times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again, unit_count = workshop.tokenize(out, workers=2)
    assert unit_count == 0 and again == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == first_times
    lost = out / f"{first.shards_of('validation')[0].name}.bin"
    lost.unlink()
    with pytest.raises(DataError, match=f"^{re.escape(str(lost))} is missing; .*verify"):
        workshop.tokenize(out)
    assert not (out / "units").exists()


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"validation_fraction": 0.1}, r"validation_fraction 0\.05, not 0\.1"),
    ({"name": "large"}, "name 'small', not 'large'"),
    ({"files_per_shard": 2}, "files_per_shard 1, not 2"),
    ({"files": slice(0, 3)}, r"other inputs \(1 differ, the first is demo-00002"),
]


def test_another_end_of_documents_is_another_tokenizer(workshop: Workshop, tmp_path: Path) -> None:
    """As where a base and an instruct model share a tokenizer.json, and differ in its config."""
    out = tmp_path / "out"
    workshop.tokenize(out, files=slice(0, 2))
    plan = out / PLAN_NAME
    content = read_checked_json(plan, "")
    content["tokenizer"]["eod_id"] += 1
    plan.write_bytes(to_checked_json(content))
    with pytest.raises(DataError, match="documents that end with id 3, not 2"):
        workshop.run(out, files=slice(0, 2)).make(Task(0, 1))
    for source, again in (("hf:web", "hf:web@1"), ("corpus", "corpus")):  # a directory called so
        content["origin"] = {"source": source, "repository": "web", "revision": "1"}
        plan.write_bytes(to_checked_json(content))
        assert at_planned_revision([source], out) == [again]


def test_a_rerun_with_other_options_inputs_or_tokenizer_is_refused(
    workshop: Workshop, other_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    base: dict[str, Any] = {"files": slice(0, 2)}
    workshop.tokenize(out, **base)
    first_contents = contents(out)
    for changed, expected in [*CHANGED, ({"model": other_model}, "another tokenizer")]:
        with pytest.raises(DataError, match=expected):
            workshop.tokenize(out, **base | changed)
    assert contents(out) == first_contents


def test_an_input_that_changed_without_changing_size_is_named(
    workshop: Workshop, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "aaaa"}\n' * 3)
    workshop.tokenize(tmp_path / "out", source)
    workshop.make_tasks(tmp_path / "begun", 1, inputs=[source])
    (tmp_path / "begun/units/small_00000.ids").unlink()  # also where the unit is made again
    source.write_text('{"text": "bbbb"}\n' * 3)
    for name in ("out", "begun"):
        with pytest.raises(DataError, match=r"in\.jsonl changed after its shards were made"):
            workshop.tokenize(tmp_path / name, source)


def test_documents_keep_their_side_when_data_is_added(workshop: Workshop, tmp_path: Path) -> None:
    part, _ = workshop.tokenize(tmp_path / "part", files=slice(2, 5))
    everything = texts_of(read_manifest(workshop.shards))
    for (split, source), texts in texts_of(part).items():
        assert texts and set(texts) <= set(everything[split, source])


def test_grouping_files_changes_the_shards_but_not_the_documents(
    workshop: Workshop, tmp_path: Path
) -> None:
    manifest, units = workshop.tokenize(tmp_path / "out", files_per_shard=3)
    assert units == 3
    assert texts_of(manifest) == texts_of(read_manifest(workshop.shards))


def test_nothing_but_empty_documents(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n')
    limits = Limits(max_reject_rate=1)
    with pytest.raises(DataError, match=r"hold no usable text \(1 empty_text\)"):
        workshop.tokenize(tmp_path / "out", tmp_path / "in.jsonl", limits=limits)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_files_are_those_of_megatrons_own_writer(tmp_path: Path, dtype: str) -> None:
    generator = np.random.Generator(np.random.Philox(7))
    documents = [
        generator.integers(0, 65_536, size=size, dtype=np.int32) for size in (1, 0, 5, 300, 2)
    ]
    writer = ShardWriter(tmp_path / "ours", dtype)
    write_documents(writer, documents[:2])
    write_documents(writer, documents[2:])
    counts = writer.finish()
    theirs = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for document in documents:
        theirs.add_document([*document.tolist(), 2], [len(document) + 1])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (
            tmp_path / f"theirs.{ending}"
        ).read_bytes()
    assert (counts["documents"], counts["tokens"]) == (5, 313)


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "int32")
    with ShardWriter(tmp_path / "x", "uint16") as writer:
        write_documents(writer, [np.array([65_535], dtype=np.int32)])
        with pytest.raises(DataError, match=r"token id \(65536\) does not fit uint16"):
            write_documents(writer, [np.array([65_536], dtype=np.int32)])
        with pytest.raises(DataError, match=r"token id \(-1\) does not fit uint16"):
            write_documents(writer, [np.array([5, -1], dtype=np.int32)])
    assert list(tmp_path.iterdir()) == []
