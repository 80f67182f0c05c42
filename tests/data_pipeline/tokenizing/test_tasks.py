"""Selection, splits, and the work shared among tasks: always the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.files import to_checked_json
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.tokenizing.plan import Task, TokenizeOptions
from data_pipeline.tokenizing.run import merge_manifests
from data_pipeline.tokenizing.verbs import which_task
from tests.data_pipeline.helpers import (
    Workshop,
    all_documents,
    contents,
    digests,
    make_task,
    quiet,
    run,
    tokenize,
)
from tests.data_pipeline.tokenizing.test_tokenize import texts_of


@pytest.mark.distributed
def test_tasks_and_merging_give_the_bytes_of_one_machine(
    workshop: Workshop, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [
        "tokenize",
        workshop.corpus,
        "--tokenizer",
        workshop.model,
        "--out",
        out,
        "--name",
        "small",
    ]
    for task in ("2", "0"):
        done = run(*command, "--task", task, "--num-tasks", "3", "--workers", "2")
        assert done.code == 0 and f"task {task} of 3" in done.out, done.err
    assert not (out / "manifest.json").exists() and not list(out.glob("*.bin"))
    assert (
        "3 of 8 units are missing, the first is small_00001.json"
        in run("merge-manifests", out).sentence()
    )
    assert run(*command, "--task", "1", "--num-tasks", "3").code == 0
    assert len(list(out.glob("*.bin"))) == 6 and not list(
        (out / "units").glob("*.ids")
    )  # the last one joins
    assert "already up to date" in run(*command, "--task", "1", "--num-tasks", "3").out
    assert run("merge-manifests", out).code == 0
    assert contents(out) == contents(workshop.shards)


def test_tasks_in_directories_of_their_own(workshop: Workshop, tmp_path: Path) -> None:
    found = find_inputs([workshop.corpus])
    for index in range(4):
        what = (found.files, workshop.model, tmp_path / str(index), workshop.options, 1, quiet)
        make_task(*what, Task(index, 4), passed_over=found.passed_over)
        shutil.copytree(tmp_path / str(index), tmp_path / "all", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "all", tmp_path / "cut")
    merge_manifests(tmp_path / "all", workers=2)
    assert contents(tmp_path / "all") == contents(workshop.shards)
    lost = tmp_path / "cut" / "units" / "small_00003.ids"
    lost.write_bytes(lost.read_bytes()[:-1])
    with pytest.raises(
        DataError, match=rf"{lost.name} is missing or cut short; run the tokenize command"
    ):
        merge_manifests(tmp_path / "cut")
    (tmp_path / "all" / "small-train-PydocTopics_00000.idx").unlink()
    with pytest.raises(
        DataError, match=r"PydocTopics_00000\.idx is missing; .* verify .* says what to do"
    ):
        merge_manifests(tmp_path / "all")


def test_records_of_another_run_are_not_merged(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "out"
    files = find_inputs([workshop.corpus]).files
    for index in range(2):
        make_task(
            files, workshop.model, out / str(index), workshop.options, 1, quiet, Task(index, 2)
        )
    shutil.copytree(out / "1", out / "0", dirs_exist_ok=True)
    record = out / "0" / "units" / "small_00002.json"
    value = json.loads(record.read_bytes())
    value.pop("checksum")
    value["tokenizer"] = "0" * 64
    record.write_bytes(to_checked_json(value))
    with pytest.raises(DataError, match=r"small_00002\.json belongs to another run"):
        merge_manifests(out / "0")


def test_the_task_comes_from_the_options_or_a_slurm_array() -> None:
    array = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_NTASKS": "9"}
    assert which_task(None, 64, array) == Task(5, 64)
    assert which_task(3, 64, array) == Task(3, 64)
    assert which_task(None, None, array) is None  # how many tasks there are is never guessed
    for task, num_tasks, message in (
        (1, None, "needs --num-tasks"),
        (None, 4, "needs --task, or a Slurm"),
    ):
        with pytest.raises(DataError, match=message):
            which_task(task, num_tasks, {})


# Documents are whole, so a small limit on many inputs leaves some room empty.
@pytest.mark.distributed
@pytest.mark.parametrize(("max_tokens", "full"), [(20_000, 0.8), (200_000, 0.95)])
def test_max_tokens_take_from_every_input_and_source(
    workshop: Workshop, tmp_path: Path, max_tokens: int, full: float
) -> None:
    files = find_inputs([workshop.corpus]).files
    options = TokenizeOptions("x", max_tokens=max_tokens, files_per_shard=2)
    manifest, _ = tokenize(files, workshop.model, tmp_path / "a", options, 1, quiet)
    tokens = sum(shard.tokens for shard in manifest.shards)
    assert full * max_tokens < tokens <= max_tokens
    assert all(entry.documents > 0 for entry in manifest.inputs)
    assert manifest.sources("train") == read_manifest(workshop.shards).sources("train")
    tokenize(files, workshop.model, tmp_path / "b", options, 3, quiet)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_more_tokens_than_there_are_is_everything(workshop: Workshop, tmp_path: Path) -> None:
    options = TokenizeOptions("small", max_tokens=10**9)
    manifest, _ = tokenize(
        find_inputs([workshop.corpus]).files, workshop.model, tmp_path / "out", options, 1, quiet
    )
    assert manifest.fingerprint == read_manifest(workshop.shards).fingerprint


def test_sources_are_selected(workshop: Workshop, tmp_path: Path) -> None:
    files, everything = find_inputs([workshop.corpus]).files, read_manifest(workshop.shards)
    without = TokenizeOptions("small", exclude_sources=("StdlibComments",))
    only = TokenizeOptions("small", sources=("PydocTopics", "StdlibDocstrings"))
    first, _ = tokenize(files, workshop.model, tmp_path / "a", without, 1, quiet)
    second, _ = tokenize(files, workshop.model, tmp_path / "b", only, 1, quiet)
    assert first.shards == second.shards
    assert first.shards == tuple(
        shard for shard in everything.shards if shard.source != "StdlibComments"
    )
    comments = [d for d in all_documents(workshop.corpus) if d.source == "StdlibComments"]
    assert first.excluded_documents == {"StdlibComments": len(comments)}
    assert (
        "'PydocTopics' is given to both"
        in run(
            *(
                "tokenize",
                workshop.corpus,
                "--tokenizer",
                workshop.model,
                "--out",
                tmp_path / "c",
                "--name",
                "x",
            ),
            *("--source", "PydocTopics", "--exclude-source", "PydocTopics"),
        ).sentence()
    )


@pytest.mark.distributed
def test_a_test_split_moves_no_document_between_the_others(
    workshop: Workshop, tmp_path: Path
) -> None:
    files = find_inputs([workshop.corpus]).files
    options = TokenizeOptions("small", validation_fraction=0.05, test_fraction=0.1)
    manifest, _ = tokenize(files, workshop.model, tmp_path / "out", options, 1, quiet)
    before, after = texts_of(read_manifest(workshop.shards)), texts_of(manifest)
    for source in manifest.sources("train"):
        assert after["validation", source] == before["validation", source]
        aside = set(after["test", source])
        assert after["train", source] == [t for t in before["train", source] if t not in aside]
        assert 0.03 < len(aside) / len(before["train", source]) < 0.2
    assert manifest.tokens("test") > 0
    whole, _ = tokenize(
        files, workshop.model, tmp_path / "test", TokenizeOptions("t", 0, test_fraction=1), 1, quiet
    )
    assert {shard.split for shard in whole.shards} == {"test"}


@pytest.mark.distributed
def test_a_large_file_in_parts_has_the_documents_of_the_whole(
    workshop: Workshop, tmp_path: Path
) -> None:
    lines = [
        json.dumps({"text": document.text}) + "\n" for document in all_documents(workshop.corpus)
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    files = find_inputs([tmp_path / "in.jsonl"]).files
    whole, units = tokenize(
        files, workshop.model, tmp_path / "whole", TokenizeOptions("x"), 1, quiet
    )
    assert units == 1
    options = TokenizeOptions("x", range_bytes=300_000)
    parts, units = tokenize(files, workshop.model, tmp_path / "parts", options, 2, quiet)
    assert units == len(parts.inputs) > 6
    assert texts_of(parts) == texts_of(whole)
    assert sum(entry.lines for entry in parts.inputs) == len(lines) == whole.inputs[0].lines


def test_max_tokens_of_a_source_that_lies_in_few_inputs(workshop: Workshop, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for number in range(8):
        source = "rare" if number == 5 else "common"
        texts = (
            {"text": f"{number} {n} " + "words of a text " * 8, "of": source} for n in range(400)
        )
        (root / f"{number}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    keys = RecordKeys(source="of")
    limit = 6000
    options = TokenizeOptions(
        "x", max_tokens=limit, sources=("rare",), keys=keys, range_bytes=20_000
    )
    plain = find_inputs([root]).files
    alone, _ = tokenize(plain, workshop.model, tmp_path / "alone", options, 1, quiet)
    tokens = sum(shard.tokens for shard in alone.shards)
    assert 0.9 * limit < tokens <= limit
    for index in (1, 0):
        make_task(plain, workshop.model, tmp_path / "tasks", options, 1, quiet, Task(index, 2))
    assert digests(merge_manifests(tmp_path / "tasks")) == digests(alone)
