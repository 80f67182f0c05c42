"""Reading from object stores and web servers: real clients against servers on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources import remote, stores
from data_pipeline.sources.discovery import find_inputs
from tests.data_pipeline.helpers import (
    Workshop,
    arguments,
    assert_same_source,
    contents,
    digests,
    run,
    run_apart,
)
from tests.data_pipeline.sources import hub_server
from tests.data_pipeline.sources.range_server import Web, serving

_BLOCK = 20_000
# Both are imported where they are used: the fast tests only collect this file, and moto takes
# seconds.
HAS_EXTRAS = find_spec("s3fs") is not None and find_spec("moto") is not None
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not HAS_EXTRAS, reason="the extras `s3` and `dev` are not installed"),
]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and short waits."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", _BLOCK)
    monkeypatch.setattr(
        stores, "PATIENCE", stores.Patience(attempts=5, first_pause=0.01, seconds=20)
    )


@pytest.fixture
def web(workshop: Workshop, hasty: None) -> Iterator[Web]:
    """A web server with a plain file, a compressed one and a parquet file of the corpus's text."""
    import pyarrow
    import pyarrow.parquet

    packed = sorted(workshop.corpus.rglob("*.jsonl.zst"))
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(packed[0].read_bytes())
    sink = pyarrow.BufferOutputStream()
    texts = [json.loads(line)["text"] for line in plain.splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink)
    files = {"x/a.jsonl": plain, "x/b.jsonl.zst": packed[1].read_bytes()}
    with serving(files | {"x/c.parquet": sink.getvalue().to_pybytes()}) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(workshop: Workshop) -> Iterator[str]:
    """A bucket with the corpus below `text/`, on moto's S3; the environment has its keys."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    keys = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        boto3.client("s3").create_bucket(Bucket="texts")
        for path in workshop.corpus.rglob("*"):
            if path.is_file():
                put("text/" + path.relative_to(workshop.corpus).as_posix(), path.read_bytes())
        yield "s3://texts/text"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def put(key: str, content: bytes) -> None:
    """Write an object."""
    import boto3

    boto3.client("s3").put_object(Bucket="texts", Key=key, Body=content)


def test_a_bucket_gives_the_shards_of_the_same_files_on_disk(
    workshop: Workshop, bucket: str, tmp_path: Path
) -> None:
    done = run("tokenize", bucket, *arguments(workshop, tmp_path / "out", "--workers", "2"))
    assert done.code == 0, done.err
    made = read_manifest(tmp_path / "out")
    local = read_manifest(workshop.shards)
    assert_same_source(made, local)
    assert made.passed_over == local.passed_over
    checked = run("verify", tmp_path / "out")
    assert checked.code == 0 and "are as in the source text" in checked.out
    before = contents(tmp_path / "out")
    again = run("tokenize", f"{bucket}/", *arguments(workshop, tmp_path / "out"))
    assert "already up to date" in again.out and contents(tmp_path / "out") == before


def test_a_tokenizer_is_trained_from_a_bucket(
    workshop: Workshop, bucket: str, tmp_path: Path
) -> None:
    command = ["train-tokenizer", bucket, "--out", tmp_path / "t", "--vocab-size", "1000"]
    assert run(*command, "--sample-bytes", "400000").code == 0
    assert (tmp_path / "t.model").read_bytes() == workshop.model.read_bytes()
    assert "already up to date" in run(*command, "--sample-bytes", "400000").out


def test_what_lies_below_a_prefix_is_accounted_for_and_patterns_choose(bucket: str) -> None:
    for name in ("x.bin", "README.md", ".hidden/a.jsonl", "empty.jsonl"):
        put(f"more/{name}", b"" if name.startswith("empty") else b"x")
    put("more/C++ und 数据/a b.jsonl", b'{"text": "x"}\n')
    put("more/chunk1/a.jsonl", b'{"text": "y"}\n')
    found = find_inputs(["s3://texts/more"])
    assert [file.name for file in found.files] == ["C++ und 数据/a b.jsonl", "chunk1/a.jsonl"]
    assert {entry.name: entry.reason for entry in found.passed_over} == {
        ".hidden/a.jsonl": "left out",
        "README.md": "left out",
        "empty.jsonl": "empty",
        "x.bin": "unknown ending",
    }
    (file,) = find_inputs(["s3://texts/more/chunk*/*.jsonl"]).files
    assert file.name == "chunk1/a.jsonl"
    with file.open() as stream:
        assert stream.read() == b'{"text": "y"}\n'


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["s3://texts/none"], "input s3://texts/none does not exist"),
        (["s3://nobody/x.jsonl"], "input s3://nobody/x.jsonl does not exist"),
        (["s3://texts/more/x.bin"], "has an unknown ending"),
        (["s3://texts/text", "/bin"], "is not on this machine, but other inputs are"),
        (["s3://texts/text", "s3://other/text"], "several places (s3://other and s3://texts)"),
        (["s3://texts/text", "--out", "s3://texts/out"], "shards are memory-mapped files"),
        (["ftp://host/a.jsonl"], "ftp:// is unknown; known are s3://"),
        (["https://me:secret@host/a.jsonl"], "holds credentials"),
    ],
)
def test_inputs_that_cannot_be_read_end_with_one_sentence(
    bucket: str, workshop: Workshop, tmp_path: Path, inputs: list[str], said: str
) -> None:
    put("more/x.bin", b"x")
    sentence = run("tokenize", *arguments(workshop, tmp_path / "out"), *inputs).sentence()
    assert said in sentence and "secret" not in sentence
    assert not (tmp_path / "out").exists()


def test_missing_keys_and_packages_are_named(
    bucket: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    said = run("tokenize", bucket, *arguments(workshop, tmp_path / "out")).sentence()
    assert "there are no credentials" in said and "AWS_ACCESS_KEY_ID" in said
    s3fs.S3FileSystem.clear_instance_cache()


def test_an_object_that_changes_is_named(bucket: str, workshop: Workshop, tmp_path: Path) -> None:
    put("changing/a.jsonl", b'{"text": "one"}\n' * 50)
    files = find_inputs(["s3://texts/changing"]).files
    put("changing/a.jsonl", b'{"text": "two"}\n' * 50)
    with pytest.raises(
        DataError, match=r"s3://texts/changing/a\.jsonl changed while .* its version is"
    ):
        files[0].open()
    out = arguments(workshop, tmp_path / "out", "--validation-fraction", "0")
    assert run("tokenize", "s3://texts/changing", *out).code == 0
    put("changing/a.jsonl", b'{"text": "six"}\n' * 50)
    said = run("tokenize", "s3://texts/changing", *out).sentence()
    assert "was begun with other inputs (1 differ, the first is a.jsonl)" in said
    checked = run("verify", tmp_path / "out")
    assert "a.jsonl changed" in checked.out + checked.err


def test_a_web_servers_files_are_read_once_in_spite_of_broken_connections(
    workshop: Workshop, web: Web, tmp_path: Path
) -> None:
    (tmp_path / "x").mkdir()
    for name, content in web.files.items():
        (tmp_path / name).write_bytes(content)
    assert run("tokenize", tmp_path / "x", *arguments(workshop, tmp_path / "local")).code == 0
    web.cut = 2
    web.fail = 1
    urls = [web.url(name) for name in web.files]
    assert run("tokenize", *urls, *arguments(workshop, tmp_path / "out")).code == 0
    made = read_manifest(tmp_path / "out")
    local = read_manifest(tmp_path / "local")
    assert digests(made) == digests(local)
    assert [entry.sha256 for entry in made.inputs] == [entry.sha256 for entry in local.inputs]
    for name, content in web.files.items():
        assert web.served[name] == len(content), f"{name} was not read once"
    assert len(web.files["x/a.jsonl"]) > 4 * _BLOCK


@pytest.mark.parametrize("nameless", [False, True])
def test_a_rerun_believes_a_version_and_hashes_what_has_none(
    workshop: Workshop, web: Web, tmp_path: Path, nameless: bool
) -> None:
    web.nameless = nameless
    command = ["tokenize", web.url("x/b.jsonl.zst"), *arguments(workshop, tmp_path / "out")]
    assert run(*command).code == 0
    (made,) = read_manifest(tmp_path / "out").inputs
    size = len(web.files["x/b.jsonl.zst"])
    assert bool(made.version) != nameless and web.served["x/b.jsonl.zst"] == size
    assert "already up to date" in run(*command).out
    assert web.served["x/b.jsonl.zst"] == (2 if nameless else 1) * size
    checked = run("verify", tmp_path / "out")
    assert checked.code == 0 and "are as in the source text" in checked.out
    content = web.files["x/b.jsonl.zst"]
    web.files["x/b.jsonl.zst"] = content[:-1] + bytes([content[-1] ^ 1])
    said = run(*command).sentence()
    assert ("changed after its shards were made" if nameless else "1 differ") in said
    checked = run("verify", tmp_path / "out")
    assert ("is not the object" if nameless else "changed while") in checked.out


@pytest.mark.parametrize(
    ("misbehaviour", "said"),
    [
        ({"fail": 99}, "503"),
        ({"fail": 99, "status": 403}, "may not be read"),
        ({"cut": 99}, "5 attempts in"),
        ({"deaf": True}, "its server ignores ranges"),
        ({"silent": True}, "3 attempts in"),
    ],
)
def test_a_server_that_fails_is_named_and_the_same_command_continues(
    workshop: Workshop,
    web: Web,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    misbehaviour: dict[str, int],
    said: str,
) -> None:
    urls = [web.url("x/b.jsonl.zst"), web.url("x/a.jsonl")]
    good = dict(vars(web))
    vars(web).update(misbehaviour)
    if "silent" in misbehaviour:
        monkeypatch.setattr(stores, "PATIENCE", stores.Patience(3, 0.01, 0.3))
    sentence = (
        run("tokenize", *urls, *arguments(workshop, tmp_path / "out"))
        .sentence()
        .replace("FSTimeout", "")
    )
    assert said in sentence and web.address in sentence
    assert not list((tmp_path / "out").glob("*.bin"))
    assert not list((tmp_path / "out/units").glob("*.ids"))
    web.released.set()
    monkeypatch.setattr(stores, "PATIENCE", stores.Patience(3, 0.01, 20))
    vars(web).update({key: good[key] for key in ("fail", "cut", "deaf", "silent")})
    assert run("tokenize", *urls, *arguments(workshop, tmp_path / "out")).code == 0


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_web_server_that_is_busy_for_a_moment_is_asked_again(web: Web, status: int) -> None:
    web.down, web.status = 3, status
    (file,) = find_inputs([web.url("x/a.jsonl")]).files
    assert file.size == len(web.files["x/a.jsonl"]) and not web.down


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [
        ("", 503, "503, message='Service Unavailable'"),
        ("", 404, "does not exist"),
        ("", 403, "may not be read"),
        ("http://127.0.0.1:9", 0, "Connect call failed"),
        ("http://no-such-host.invalid", 0, "Cannot connect to host no-such-host.invalid"),
    ],
)
def test_a_web_server_that_does_not_answer_is_not_told_as_a_file_that_is_not_there(
    web: Web, address: str, status: int, said: str
) -> None:
    web.down, web.status = 99, status
    with pytest.raises(DataError) as refused:
        find_inputs([f"{address or web.address}/x/a.jsonl"])
    assert said in str(refused.value)
    lasting = status in (403, 404)
    assert ("does not exist" in str(refused.value)) == (status == 404)
    assert ("5 attempts in" in str(refused.value)) != lasting


def test_a_server_that_compresses_on_the_way_is_read_in_ranges(web: Web) -> None:
    web.packs = True
    (file,) = find_inputs([web.url("x/a.jsonl")]).files
    with file.open() as stream:
        assert stream.read() == web.files["x/a.jsonl"]


def test_a_file_that_changes_while_it_is_read_makes_no_shard(
    workshop: Workshop, web: Web, tmp_path: Path
) -> None:
    content = web.files["x/a.jsonl"]
    web.replace_after = (2, "x/a.jsonl", content[::-1])
    said = run("tokenize", web.url("x/a.jsonl"), *arguments(workshop, tmp_path / "out")).sentence()
    assert "x/a.jsonl changed while it was being worked on" in said
    assert not list((tmp_path / "out/units").glob("*.ids"))


def test_any_reading_gives_the_bytes(web: Web) -> None:
    content = web.files["x/a.jsonl"]
    (file,) = find_inputs([web.url("x/a.jsonl")]).files
    generator = np.random.default_rng(0)
    with file.open() as stream:
        for start, size in generator.integers(0, [len(content) + 9, 3 * _BLOCK], (40, 2)).tolist():
            stream.seek(start)
            found = b""
            while len(found) < size and (part := stream.read(size - len(found))):
                found += part
            assert found == content[start : start + size]
        assert stream.seek(-5, os.SEEK_END) == len(content) - 5 and stream.read() == content[-5:]


def test_a_data_set_of_the_hub_is_read_where_it_lies(workshop: Workshop, tmp_path: Path) -> None:
    files = {
        f"train/{path.relative_to(workshop.corpus).as_posix()}": path.read_bytes()
        for path in workshop.corpus.rglob("*")
        if path.is_file()
    }
    with hub_server.serve(files) as hub:
        environment = {
            "HF_ENDPOINT": hub.address,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": "/nonexistent",
        }
        place = f"hf://datasets/{hub_server.REPOSITORY}/train"
        what = arguments(workshop, tmp_path / "out", "--workers", "2")
        done = run_apart("tokenize", place, *what, environment=environment)
        assert done.code == 0, done.err
        made = read_manifest(tmp_path / "out")
        assert digests(made) == digests(read_manifest(workshop.shards))
        # The hub's version of a large file is its SHA-256.
        assert all(entry.version == entry.sha256 for entry in made.inputs)
        missing = run_apart("tokenize", "hf://datasets/no/where", *what, environment=environment)
        assert "does not exist" in missing.sentence()
