"""Reading from Google Cloud Storage: the real gcsfs against a server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Asked for without importing it: `data_pipeline.sources.stores` settles what gcsfs reads when it is imported.
if find_spec("gcsfs") is None:
    pytest.skip("the extra `gs` is not installed", allow_module_level=True)

import fsspec
import fsspec.config

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources import remote, stores
from data_pipeline.sources.discovery import find_inputs
from tests.data_pipeline.helpers import Workshop, arguments, assert_same_source, run, run_apart
from tests.data_pipeline.sources import gs_server
from tests.data_pipeline.sources.gs_server import Bucket

_LINE = b'{"text": "x"}\n'
pytestmark = pytest.mark.distributed


@pytest.fixture
def bucket(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket with the corpus below `text/`; how to reach it is in the environment."""
    objects = {
        f"text/{path.relative_to(workshop.corpus).as_posix()}": path.read_bytes()
        for path in workshop.corpus.rglob("*")
        if path.is_file()
    }
    with gs_server.serve("texts", objects) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
        monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
        # fsspec reads the variable only when it is imported.
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        monkeypatch.setattr(
            stores, "PATIENCE", stores.Patience(attempts=3, first_pause=0.01, seconds=20)
        )
        stores.filesystem("gs://texts").clear_instance_cache()
        yield server
        stores.filesystem("gs://texts").clear_instance_cache()


def test_a_bucket_gives_the_shards_of_the_same_files_on_disk(
    workshop: Workshop, bucket: Bucket, tmp_path: Path
) -> None:
    """In a process of its own, as a user runs it; waiting for gRPC, which nobody answers, would end it."""
    done = run_apart("tokenize", "gs://texts/text", *arguments(workshop, tmp_path / "out"))
    assert done.code == 0, done.err
    made, local = read_manifest(tmp_path / "out"), read_manifest(workshop.shards)
    assert_same_source(made, local)
    for entry in made.inputs:
        key = f"text/{entry.name}"
        assert bucket.served[key] == len(bucket.objects[key]), f"{key} was not read once"
    assert made.passed_over == local.passed_over
    assert bucket.pages > 1
    again = run("tokenize", "gs://texts/text/", *arguments(workshop, tmp_path / "out"))
    assert "already up to date" in again.out


def test_what_lies_below_a_prefix_is_accounted_for_and_patterns_choose(bucket: Bucket) -> None:
    names = (
        "C# und 数据/a b.jsonl",
        "chunk1/a.jsonl",
        "chunk1/deep/er/b.jsonl",
        "x.bin",
        "README.md",
    )
    bucket.objects |= {f"more/{name}": _LINE for name in names}
    # What a console makes as a folder is an empty object.
    bucket.objects |= {
        "more/": b"",
        "more/chunk1/": b"",
        "more/empty.jsonl": b"",
        "moreover/c.jsonl": _LINE,
    }
    found = find_inputs(["gs://texts/more"])
    assert [file.name for file in found.files] == list(names[:3])
    assert {entry.name: entry.reason for entry in found.passed_over} == {
        "README.md": "left out",
        "empty.jsonl": "empty",
        "x.bin": "unknown ending",
    }
    (file,) = find_inputs(["gs://texts/more/chunk*/*.jsonl"]).files
    assert file.name == "chunk1/a.jsonl"
    (file,) = find_inputs([f"gs://texts/more/{names[0]}"]).files
    with file.open() as stream:
        assert stream.read() == _LINE


def test_a_connection_that_breaks_once_is_made_again_and_one_that_keeps_breaking_is_named(
    workshop: Workshop, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 20_000)
    key = max(bucket.objects, key=lambda name: len(bucket.objects[name]))
    assert len(bucket.objects[key]) > 2 * remote.BLOCK_BYTES
    (file,) = find_inputs([f"gs://texts/{key}"]).files
    bucket.cut = 1
    with file.open() as stream:
        assert stream.read() == bucket.objects[key]
    assert bucket.cut == 0 and bucket.served[key] == len(bucket.objects[key])
    bucket.cut = 99
    # Shorter than gcsfs itself goes on trying.
    monkeypatch.setattr(
        stores, "PATIENCE", stores.Patience(attempts=2, first_pause=0.01, seconds=0.4)
    )
    said = run("tokenize", f"gs://texts/{key}", *arguments(workshop, tmp_path / "out")).sentence()
    assert f"cannot read gs://texts/{key}" in said and "2 attempts in" in said
    assert not list((tmp_path / "out").glob("*.bin"))
    bucket.cut = 0
    monkeypatch.setattr(
        stores, "PATIENCE", stores.Patience(attempts=2, first_pause=0.01, seconds=20)
    )
    assert run("tokenize", f"gs://texts/{key}", *arguments(workshop, tmp_path / "out")).code == 0


@pytest.mark.parametrize("place", ["texts/none", "texts/none.jsonl", "nobody", "nobody/x.jsonl"])
def test_what_does_not_exist_ends_with_one_sentence(
    bucket: Bucket, workshop: Workshop, tmp_path: Path, place: str
) -> None:
    said = run("tokenize", f"gs://{place}", *arguments(workshop, tmp_path / "out")).sentence()
    assert f"input gs://{place} does not exist" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "may not be read with"), (403, "may not be read with"), (400, "cannot read")],
)
def test_an_answer_that_asking_again_does_not_change_is_given_at_once(
    bucket: Bucket, status: int, said: str
) -> None:
    bucket.status = status
    for place in ("gs://texts/text", "gs://texts/text/a.jsonl"):
        with pytest.raises(DataError, match=said) as caught:
            find_inputs([place])
        assert place in str(caught.value) and "attempts" not in str(caught.value)


def test_credentials_that_do_not_fit_are_named_without_a_traceback(
    bucket: Bucket, workshop: Workshop, tmp_path: Path
) -> None:
    """In processes of their own: there gcsfs's log has nobody else who takes it."""
    what = ["tokenize", "gs://texts/text", *arguments(workshop, tmp_path / "out")]
    (tmp_path / "key.json").write_text("{}")
    said = run_apart(*what, environment={"FSSPEC_GS_TOKEN": str(tmp_path / "key.json")}).sentence()
    assert (
        "credentials for gs:// cannot be used" in said and "GOOGLE_APPLICATION_CREDENTIALS" in said
    )
    bucket.status = 401
    assert "GOOGLE_APPLICATION_CREDENTIALS" in run_apart(*what).sentence()


def test_an_object_that_changes_is_named(bucket: Bucket) -> None:
    bucket.objects["changing/a.jsonl"] = _LINE
    (file,) = find_inputs(["gs://texts/changing"]).files
    bucket.objects["changing/a.jsonl"] = _LINE.replace(b"x", b"y")
    with pytest.raises(
        DataError, match=r"gs://texts/changing/a\.jsonl changed while .* its version is"
    ):
        file.open()
