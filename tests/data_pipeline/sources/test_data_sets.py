"""Data sets as inputs: of `save_to_disk`, of a hub on loopback, of the readers of `datasets`."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets.filesystems.compression import GzipFileSystem

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest, read_manifest
from data_pipeline.sources import data_sets
from data_pipeline.sources.records import LOST
from data_pipeline.tokenizing.plan import UNITS_NAME, TokenizeOptions
from data_pipeline.tokenizing.run import tokenize_data
from tests.data_pipeline.helpers import (
    REPOSITORY,
    Outcome,
    Workshop,
    all_documents,
    apart,
    contents,
    digests,
    run,
    wait_until,
)
from tests.data_pipeline.sources.hub_server import COMMIT, Hub, serve

pytestmark = pytest.mark.distributed
NAME = "acme/slim"


@pytest.fixture(scope="module")
def rows(workshop: Workshop) -> list[dict[str, Any]]:
    """The corpus's documents as the rows of a table, with SlimPajama's name of the source."""
    return [
        {"text": document.text, "meta": {"redpajama_set_name": document.source}}
        for document in all_documents(workshop.corpus)
    ]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def repository(rows: list[dict[str, Any]], shards: int = 3) -> dict[str, bytes]:
    """A data set of the hub with these rows in some files, and a small split beside them."""
    size = -(-len(rows) // shards)
    files = {
        f"data/train-{i:05d}-of-{shards:05d}.parquet": parquet(rows[i * size : (i + 1) * size])
        for i in range(shards)
    }
    held_out = {"data/validation-00000-of-00001.parquet": parquet(rows[:2])}
    return files | held_out | {"README.md": b"# slim\n"}


def client(hub: Hub, home: Path, **more: str) -> AbstractContextManager[Callable[..., Outcome]]:
    """The command line of a machine whose hub is this one."""
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return apart(**variables, **more)


def shard_bytes(directory: Path) -> dict[str, bytes]:
    return {
        name: data for name, data in contents(directory).items() if name[-4:] in (".bin", ".idx")
    }


@pytest.fixture(scope="module")
def local(
    rows: list[dict[str, Any]], workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    """The shards of the rows in one file of JSON lines."""
    root = tmp_path_factory.mktemp("local")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "rows.jsonl").write_text(text)
    assert run(*workshop.command(root / "out", corpus=root / "rows.jsonl")).code == 0
    return read_manifest(root / "out")


def test_a_file_a_saved_data_set_and_the_hub_give_the_same_shards(
    rows: list[dict[str, Any]],
    local: Manifest,
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved", num_shards=2)
    monkeypatch.setattr(data_sets, "_SHARD_ROWS", 100)
    out = tmp_path / "of-disk"
    done = run(*workshop.command(out, corpus=tmp_path / "saved"))
    assert done.code == 0, done.err
    manifest = read_manifest(out)
    assert digests(manifest) == digests(local)
    fingerprint = datasets.load_from_disk(tmp_path / "saved")._fingerprint
    directory = str(tmp_path / "saved")
    assert manifest.origin == {"source": directory, "repository": "", "revision": fingerprint}
    count = -(-len(rows) // 100)
    assert [entry.name for entry in manifest.inputs] == [
        f"data-{index:05d}-of-{count:05d}" for index in range(count)
    ]
    assert {entry.version for entry in manifest.inputs} == {fingerprint}
    assert "are as in the source text" in run("verify", out).out

    with serve(repository(rows)) as hub, client(hub, tmp_path / "home") as command:
        out = tmp_path / "of-hub"
        entry = f"hf:{NAME}:default:train@main"
        hub.busy[""] = 1  # the first request
        done = command(*workshop.command(out, "--workers", "2", corpus=entry))
        assert done.code == 0 and f"{entry}: " in done.err and "again in 1 s" in done.err
        manifest = read_manifest(out)
        assert digests(manifest) == digests(local)
        assert [entry.name for entry in manifest.inputs] == [
            f"train-{index:05d}-of-00003" for index in range(3)
        ]
        source = f"hf:{NAME}:default:train"
        assert manifest.origin == {"source": source, "repository": NAME, "revision": COMMIT}
        assert {entry.version for entry in manifest.inputs} == {f"default:train@{COMMIT}"}
        assert "are as in the source text" in command("verify", out).out
        # A finished directory reads no rows again.
        hub.requests.clear()
        again = command(*workshop.command(out, corpus=entry))
        assert "already up to date (3 units)" in again.out and len(hub.requests) <= 4


@pytest.mark.slow
def test_killed_and_continued_in_tasks_while_the_branch_moves(
    rows: list[dict[str, Any]], local: Manifest, workshop: Workshop, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    entry = f"hf:{NAME}"
    with serve(repository(rows, shards=5)) as hub:
        home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
        words = workshop.command(out, "--num-tasks=2", "--task=0", corpus=entry)
        process = subprocess.Popen(
            [sys.executable, "-m", "data_pipeline", *map(str, words)],
            cwd=REPOSITORY,
            env=os.environ | home,
        )
        wait_until(lambda: len([*(out / UNITS_NAME).glob("*.json")]) > 0, "work item")
        process.kill()
        process.wait()
        unit_times = {path: path.stat().st_mtime_ns for path in (out / UNITS_NAME).glob("*.json")}
        hub.commits = {COMMIT, COMMIT[::-1]}
        hub.commit = COMMIT[::-1]  # what main is now
        with client(hub, tmp_path / "home") as command:
            for task, workers in (("0", "1"), ("1", "2")):
                share = ("--num-tasks", "2", "--task", task, "--workers", workers)
                done = command(*workshop.command(out, *share, corpus=entry))
                assert done.code == 0, done.err
            assert unit_times == {path: path.stat().st_mtime_ns for path in unit_times}
            assert run("merge-manifests", out).code == 0
            assert digests(read_manifest(out)) == digests(local)
            assert read_manifest(out).origin["revision"] == COMMIT
            moved = command(*workshop.command(out, corpus=f"{entry}@main")).sentence()
        assert f"hf:{NAME} at {COMMIT}, not of hf:{NAME} at {COMMIT[::-1]}" in moved


@pytest.mark.slow
def test_offline_what_is_in_the_cache_is_read(
    rows: list[dict[str, Any]], local: Manifest, workshop: Workshop, tmp_path: Path
) -> None:
    with serve(repository(rows)) as hub:
        home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
        program = f"import datasets; datasets.load_dataset({NAME!r})"
        subprocess.run([sys.executable, "-c", program], env=os.environ | home, check=True)
    out = tmp_path / "out"
    with client(hub, tmp_path / "home", HF_HUB_OFFLINE="1") as command:
        done = command(*workshop.command(out, corpus=f"hf:{NAME}"))
        assert done.code == 0, done.err
        assert digests(read_manifest(out)) == digests(local)
        absent = command(*workshop.command(tmp_path / "no", corpus="hf:acme/absent"))
    assert "cannot read hf:acme/absent" in absent.sentence()


def test_the_mistakes_of_a_hub_input_are_one_sentence(workshop: Workshop, tmp_path: Path) -> None:
    row = {"text": ["a", "list"], "content": "x"}
    files = {
        "data/train-00000-of-00001.parquet": parquet([row]),
        "data/dev-00000-of-00001.parquet": parquet([row]),
    }
    out = tmp_path / "out"
    with serve(files) as hub, client(hub, tmp_path / "home") as command:

        def refused(entry: str, *more: str) -> str:
            return command(*workshop.command(out, *more, corpus=entry)).sentence()

        for entry, more, expected in (
            (f"hf:{NAME}", ("--text-key", "body"), 'no column "body", it has text, content; name'),
            (f"hf:{NAME}", (), 'the column "text" holds lists, not text'),
            (f"hf:{NAME}:default:test", (), "has no split test; it has train, dev"),
            (f"hf:{NAME}:other", (), "BuilderConfig 'other' not found. Available: ['default']"),
            (f"hf:{NAME}@v9", (), "has no revision v9"),
            (f"hf:{NAME}:a:b:c", (), "is not hf:NAME[:CONFIG[:SPLIT]][@REVISION]"),
            ("hf:acme/absent", (), "the hub has no data set acme/absent"),
        ):
            assert expected in refused(entry, *more), entry
        hub.gated = True
        hub.repository = "acme/gated"
        terms = "acme/gated is gated: accept its terms on the hub and give a token"
        assert terms in refused("hf:acme/gated")
        hub.gated = False
        hub.repository = "acme/script"
        hub.files = {"script.py": b"import datasets\n", "README.md": b"# slim\n"}
        sentence = refused("hf:acme/script")
        assert "is a script" in sentence and "hf:acme/script@refs/convert/parquet" in sentence
    assert not out.exists()


@pytest.mark.slow
def test_no_network_is_one_sentence_after_some_patience(workshop: Workshop, tmp_path: Path) -> None:
    with client(Hub({}, address="http://127.0.0.1:9"), tmp_path / "home") as command:
        done = command(*workshop.command(tmp_path / "out", corpus=f"hf:{NAME}"))
    assert done.code == 2
    *notes, sentence = done.err.splitlines()
    for wait, note in zip((1, 4, 10), notes, strict=True):
        assert f"asking for it again in {wait} s" in note
    assert sentence.startswith(f"error: cannot read hf:{NAME}: ")


def saved(directory: Path, data: Any) -> Path:
    data.save_to_disk(directory)
    return directory


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: datasets.Dataset.from_dict({"text": []}), "has no rows; give another split"),
        (
            lambda: datasets.DatasetDict(
                {name: datasets.Dataset.from_dict({"text": ["a"]}) for name in ("a", "b")}
            ),
            "has no split train; it has a, b: give ",
        ),
        (
            lambda: datasets.Dataset.from_dict({"x" * 90: ["a"], "ids": [[1]]}),
            f'has no column "text", it has {"x" * 40}…, ids; name the column',
        ),
        (lambda: datasets.Dataset.from_dict({"text": [[1]]}), 'the column "text" holds lists'),
    ],
)
def test_a_saved_data_set_that_cannot_be_used(
    workshop: Workshop, tmp_path: Path, make: Callable[[], Any], expected: str
) -> None:
    path = saved(tmp_path / "saved", make())
    assert expected in run(*workshop.command(tmp_path / "out", corpus=path)).sentence()
    assert not (tmp_path / "out").exists()


def test_of_several_splits_train_is_read_and_another_is_a_directory(
    workshop: Workshop, tmp_path: Path
) -> None:
    splits = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(30)]})
        for name in ("test", "train")
    }
    path = saved(tmp_path / "saved", datasets.DatasetDict(splits))
    for entry, split in ((path, "train"), (path / "test", "data")):
        out = tmp_path / f"of-{split}"
        assert run(*workshop.command(out, corpus=entry)).code == 0
        assert [entry.name for entry in read_manifest(out).inputs] == [f"{split}-00000-of-00001"]


def test_a_saved_data_set_that_changed_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    path = saved(tmp_path / "saved", datasets.Dataset.from_dict({"text": ["one", "two"] * 20}))
    out = tmp_path / "out"
    assert run(*workshop.command(out, corpus=path)).code == 0
    shutil.rmtree(path)
    saved(path, datasets.Dataset.from_dict({"text": ["three"] * 40}))
    said = run(*workshop.command(out, corpus=path)).sentence()
    assert f"was begun with inputs of {path} at " in said
    assert "is not what was tokenised" in run("verify", out).out


def test_rows_that_are_no_documents_are_named_and_counted(
    workshop: Workshop, tmp_path: Path
) -> None:
    texts = ["a text of words"] * 300 + [None, "", "nul \0 inside"]
    path = saved(tmp_path / "saved", datasets.Dataset.from_dict({"text": texts}))
    out = tmp_path / "out"
    assert run(*workshop.command(out, corpus=path)).code == 0
    manifest = read_manifest(out)
    assert manifest.rejects == {"empty_text": 1, "missing_text": 1}
    assert manifest.unusual == {"contains_nul": 1}
    lines = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in lines] == [
        ("data-00000-of-00001", number) for number in (301, 302, 303)
    ]


def test_files_that_readers_of_datasets_read(workshop: Workshop, tmp_path: Path) -> None:
    texts = [f'words, "quoted" and\nlines {n}' for n in range(40)] + ["NA"]
    quoted = [text.replace('"', '""') for text in texts]
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f'"{text}",1\n' for text in quoted))
    (tmp_path / "a.tsv").write_text("n\ttext\n" + "".join(f'1\t"{text}"\n' for text in quoted))
    saved(tmp_path / "saved", datasets.Dataset.from_dict({"text": texts}))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, text in enumerate(texts):
            entry = tarfile.TarInfo(f"{number:04d}.txt")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    shards_by_reader = {}
    for name, entry, key in (
        ("saved", str(tmp_path / "saved"), "text"),
        ("csv", f"csv:{tmp_path}/a.csv", "text"),
        ("tsv", f"csv:{tmp_path}/*.tsv", "text"),
        ("arrow", f"arrow:{tmp_path}/saved/*.arrow", "text"),
        ("webdataset", f"webdataset:{tmp_path}/a.tar", "txt"),
    ):
        out = tmp_path / f"out-{name}"
        done = run(*workshop.command(out, "--text-key", key, corpus=entry))
        assert done.code == 0, done.err
        shards_by_reader[name] = shard_bytes(out)
    assert all(shards == shards_by_reader["saved"] for shards in shards_by_reader.values())
    (tmp_path / "lines.log").write_text("one\ntwo\n\n \nthree\n")
    command = workshop.command(tmp_path / "text", corpus=f"text:{tmp_path}/lines.log")
    assert run(*command).code == 0  # blank lines are none
    manifest = read_manifest(tmp_path / "text")
    assert manifest.rejects == {} and sum(shard.documents for shard in manifest.shards) == 3


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("a.csv", "text,author\n" + "a text,a name,\n" * 40),
        ("a.csv", "text\n" + "a text, with a comma\n" * 40),
        ("tables/a.csv", "text,author\n" + "a text,a name,\n" * 40),
    ],
)
def test_a_table_with_more_fields_than_names_is_refused(
    name: str, table: str, workshop: Workshop, tmp_path: Path
) -> None:
    """Else pandas takes the first field for a number of the row, and the next one for the text."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(table)
    entry = f"csv:{(tmp_path / name).parent if '/' in name else tmp_path / name}"
    said = run(*workshop.command(tmp_path / "out", corpus=entry)).sentence()
    assert "rows have more fields than the first line has names; quote texts that hold" in said
    assert all(entry[0] != "error" for entry in warnings.filters)  # of whoever imports this


def test_every_table_of_a_directory_is_read_whatever_its_name(
    workshop: Workshop, tmp_path: Path
) -> None:
    """`datasets` would take the file with the name of a split alone, and a note for a table."""
    for name in ("a.csv", "B.CSV", "my-test.csv"):
        (tmp_path / "tables.tsv.d").mkdir(exist_ok=True)
        (tmp_path / "tables.tsv.d" / name).write_text(f"text,n\none of {name},1\ntwo of {name},2\n")
    (tmp_path / "tables.tsv.d/NOTES.txt").write_text("about\nthis corpus\n")
    tables = f"csv:{tmp_path}/tables.tsv.d"
    assert run(*workshop.command(tmp_path / "out", corpus=tables)).code == 0
    assert sum(shard.documents for shard in read_manifest(tmp_path / "out").shards) == 6
    one = workshop.command(tmp_path / "one", corpus=f"{tables}/a.csv")
    assert run(*one).code == 0
    inside = workshop.command(tmp_path / "tables.tsv.d/out", corpus=tables)
    assert "lies inside the input directory" in run(*inside).sentence()


def test_a_directory_of_tables_by_tabs_is_read_by_tabs(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    rows = [f"a text, with a comma {number}\n" for number in range(40)]
    (tmp_path / "tables/a.tsv").write_text("text\n" + "".join(rows))
    done = run(*workshop.command(tmp_path / "out", corpus=f"csv:{tmp_path}/tables"))
    assert done.code == 0 and read_manifest(tmp_path / "out").rejects == {}
    verified = run("verify", tmp_path / "out")
    assert "40 documents of 1 units are as in the source text" in verified.out


def test_of_texts_in_memory_only_the_odd_ones_are_left_out(
    workshop: Workshop, tmp_path: Path
) -> None:
    odd = {100: "half \ud800", 700: b"bytes", 900: 5, 1300: None}
    texts = [odd.get(number, f"a text of words {number}") for number in range(1500)]
    options = TokenizeOptions("x")
    manifest = tokenize_data(texts, workshop.model, tmp_path / "out", options)
    assert sum(shard.documents for shard in manifest.shards) == 1496
    assert manifest.rejects == {"lone_surrogate": 1, "missing_text": 1, "text_not_string": 2}


def test_damage_in_the_middle_of_a_shard_is_named_and_the_rest_is_kept(
    workshop: Workshop, tmp_path: Path
) -> None:
    rows = [f"text {n},1" for n in range(25_000)]
    rows[20_123] += ",2,3"
    (tmp_path / "a.csv").write_text("text,n\n" + "\n".join(rows) + "\n")
    out = tmp_path / "out"
    done = run(*workshop.command(out, corpus=f"csv:{tmp_path}/a.csv"))
    assert done.code == 3 and "damaged input train-00000-of-00001: damaged: " in done.err
    (entry,) = read_manifest(out).inputs
    assert entry.lines == 39 * 512 and "Expected 2 fields" in entry.damaged
    assert entry.damaged.split(":")[0] in LOST


def test_compressed_files_of_s3_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `datasets` hands its own file system an argument that s3fs does not take."""
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    s3fs.S3FileSystem.clear_instance_cache()
    file = GzipFileSystem("s3://bucket/x.jsonl.gz")
    with (
        pytest.raises(DataError, match=r"cannot stream compressed files of S3; copy them"),
        data_sets.refusing("json:s3://bucket/x.jsonl.gz"),
    ):
        file.cat("x.jsonl")


def test_a_bucket_without_such_files_is_one_sentence() -> None:
    nothing: Iterator[str] = iter(())
    with (
        pytest.raises(DataError, match=r"^json:s3://bucket/\*: there are no such files"),
        data_sets.refusing("json:s3://bucket/*"),
    ):
        next(nothing)


def test_other_mistakes_are_one_sentence(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "empty.csv").write_text("text\n")
    (tmp_path / "bars.csv").write_text("id;text\n1;x\n")
    (tmp_path / "open.csv").write_text('text,id\nwords,1\n"never closed,2\nx,3\n')
    (tmp_path / "old.csv").write_bytes(b"text,id\nwords,1\nGr\xf6\xdfe,2\n")
    path = saved(tmp_path / "saved", datasets.Dataset.from_dict({"text": ["a"]}))
    unread = f"cannot read csv:{tmp_path}"
    for entries, expected in (
        ([f"csv:{tmp_path}/b.csv"], f"{unread}/b.csv: Unable to find"),
        ([f"csv:{tmp_path}/empty.csv"], "has no rows"),
        ([f"csv:{tmp_path}/open.csv"], f"{unread}/open.csv: Error tokenizing data. C error: EOF"),
        ([f"csv:{tmp_path}/old.csv"], f"{unread}/old.csv: 'utf-8' codec can't decode"),
        ([f"csv:{tmp_path}/bars.csv"], 'has no column "text", it has id;text; name the column'),
        ([tmp_path / "a.csv"], "is a table; give csv:FILE"),
        (["quark:x"], "quark not a reader; readers are hf (the hub), arrow, "),
        (["s3://bucket/x.jsonl"], "json:s3://bucket/x.jsonl"),
        (["https://user:secret@host/x.jsonl"], "holds credentials; leave them out"),
        ([path, tmp_path / "a.csv"], "is a data set, and there are other inputs"),
    ):
        command = workshop.command(tmp_path / "out", *entries[1:], corpus=entries[0])
        said = run(*command).sentence()
        assert expected in said and "secret" not in said
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_trained_on_a_data_set(
    rows: list[dict[str, Any]], workshop: Workshop, tmp_path: Path
) -> None:
    path = saved(tmp_path / "saved", datasets.Dataset.from_list(rows))
    size = ("--vocab-size", "600", "--sample-bytes", "100000")
    first = run("train-tokenizer", path, "--out", tmp_path / "t", *size)
    assert first.code == 0 and "trained" in first.out
    report = json.loads((tmp_path / "t.json").read_bytes())
    assert [entry["name"] for entry in report["inputs"]] == ["data-00000-of-00001"]
    again = run("train-tokenizer", path, "--out", tmp_path / "t", *size)
    assert "already up to date" in again.out
