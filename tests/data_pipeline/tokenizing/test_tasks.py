"""Selection, splits, and the work shared among tasks: always the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.tokenizing.plan import Task
from data_pipeline.tokenizing.run import finish
from data_pipeline.tokenizing.verbs import which_task
from tests.data_pipeline.helpers import Workshop, all_documents, change_checked, contents, run
from tests.data_pipeline.tokenizing.test_tokenize import texts_of


@pytest.mark.distributed
def test_tasks_and_merging_give_the_bytes_of_one_machine(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Two tasks of more workers than units in one directory, and one whose files are copied."""
    out = tmp_path / "out"
    share = ("--num-tasks", "3", "--task")
    begun = workshop.run(tmp_path / "begun", files_per_shard=1)
    sizes = [begun.input_bytes(Task(index, 3)) for index in range(3)]
    assert sum(sizes) == begun.input_bytes(Task(0, 1)) > max(sizes)
    for task, workers in (("2", "2"), ("0", "16")):
        done = run(*workshop.command(out, *share, task, "--workers", workers))
        assert done.code == 0 and f"task {task} of 3" in done.out, done.err
    said = run("merge-manifests", out).sentence()
    assert "3 of 8 units are missing, the first is small_00001.json" in said
    assert run(*workshop.command(tmp_path / "elsewhere", *share, "1")).code == 0
    shutil.copytree(tmp_path / "elsewhere", out, dirs_exist_ok=True)
    assert not (out / "manifest.json").exists() and not list(out.glob("*.bin"))
    assert "already up to date" in run(*workshop.command(out, *share, "1")).out
    ids = out / "units" / "small_00003.ids"
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-1])
    said = run("merge-manifests", out).sentence()
    assert f"{ids} is missing or cut short; run the tokenize command" in said
    ids.write_bytes(whole)
    assert run("merge-manifests", out, "--workers", "2").code == 0
    assert contents(out) == contents(workshop.shards)


def test_records_of_another_run_are_not_merged(workshop: Workshop, tmp_path: Path) -> None:
    workshop.make_tasks(tmp_path, 2)
    record = tmp_path / "units" / "small_00002.json"
    change_checked(record, lambda value: value.update(tokenizer="0" * 64))
    with pytest.raises(DataError, match=r"small_00002\.json belongs to another run"):
        finish(tmp_path)


def test_the_task_comes_from_the_options_or_a_slurm_array() -> None:
    array = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_NTASKS": "9"}
    assert which_task(None, 64, array) == Task(5, 64)
    assert which_task(3, 64, array) == Task(3, 64)
    assert which_task(None, None, array) is None  # how many tasks there are is never guessed


def test_sources_are_selected(workshop: Workshop, tmp_path: Path) -> None:
    everything = read_manifest(workshop.shards)
    first, _ = workshop.tokenize(tmp_path / "a", exclude_sources=("StdlibComments",))
    second, _ = workshop.tokenize(tmp_path / "b", sources=("PydocTopics", "StdlibDocstrings"))
    assert first.shards == second.shards
    assert list(first.shards) == [s for s in everything.shards if s.source != "StdlibComments"]
    comments = [d for d in all_documents(workshop.corpus) if d.source == "StdlibComments"]
    assert first.excluded_documents == {"StdlibComments": len(comments)}


@pytest.mark.distributed
def test_a_test_split_moves_no_document_between_the_others(
    workshop: Workshop, tmp_path: Path
) -> None:
    manifest, _ = workshop.tokenize(tmp_path / "out", test_fraction=0.1)
    default_texts = texts_of(read_manifest(workshop.shards))
    after = texts_of(manifest)
    for source in manifest.sources("train"):
        assert after["validation", source] == default_texts["validation", source]
        aside = set(after["test", source])
        assert after["train", source] == [
            t for t in default_texts["train", source] if t not in aside
        ]
        assert 0.03 < len(aside) / len(default_texts["train", source]) < 0.2
    assert manifest.tokens("test") > 0
    whole, _ = workshop.tokenize(tmp_path / "test", validation_fraction=0, test_fraction=1)
    assert {shard.split for shard in whole.shards} == {"test"}


@pytest.mark.parametrize(
    ("option", "value"), [("max_tokens", 5000), ("range_bytes", 1000)], ids=["sample", "parts"]
)
def test_options_of_earlier_versions_are_refused(
    workshop: Workshop, tmp_path: Path, option: str, value: int
) -> None:
    """A directory that was begun with one is not continued as if it had not been."""
    workshop.make_tasks(tmp_path, 2)
    change_checked(tmp_path / "plan.json", lambda plan: plan["options"].update({option: value}))
    with pytest.raises(DataError, match=f"was begun with {option} {value}, not "):
        workshop.tokenize(tmp_path)
    with pytest.raises(DataError, match=f"{option} {value} is of an earlier version"):
        finish(tmp_path)
