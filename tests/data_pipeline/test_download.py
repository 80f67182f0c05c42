"""`download` against a hub on loopback, with the real client."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx2
import pyarrow.parquet
import pytest
import zstandard
from huggingface_hub import errors

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources.hub import SOURCES, RemoteFile, Wanted, passes, repeat
from tests.data_pipeline.helpers import REPOSITORY as REPOSITORY_ROOT
from tests.data_pipeline.helpers import Outcome, Workshop, apart, run, wait_until
from tests.data_pipeline.sources.hub_server import COMMIT, REPOSITORY, Hub, serve

FINEWEB = "sample/10BT/000_00000.parquet"
DCLM = "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst"


def corpus() -> dict[str, bytes]:
    """The layout of SlimPajama: chunks of every split, a README that nobody asked for."""
    files = {
        "README.md": b"# slim",
        "train/chunk1/tiny.jsonl.zst": zstandard.compress(b'{"text": "x"}\n'),
    }
    for chunk in (1, 2, 10):
        for number in range(4):
            name = f"train/chunk{chunk}/example_train_{number}.jsonl.zst"
            lines = b"".join(
                json.dumps({"text": f"{chunk} {number} {line * 7919**7}"}).encode() + b"\n"
                for line in range(200)
            )
            files[name] = zstandard.compress(lines)
    files["validation/chunk1/example_holdout_0.jsonl.zst"] = zstandard.compress(
        b'{"text": "held out"}\n' * 50
    )
    return files


Download = Callable[..., Outcome]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Hub, Download]]:
    """A hub, and `download` of its repository on a machine that knows no other hub."""
    with serve({}) as hub, client(HF_ENDPOINT=hub.address) as command:
        yield (
            hub,
            lambda *more, source="slimpajama": command(
                "download", source, "--hub-id", REPOSITORY, *more
            ),
        )


def client(**variables: str) -> AbstractContextManager[Download]:
    return apart(HF_HUB_DISABLE_TELEMETRY="1", HF_HOME="/nonexistent", **variables)


@pytest.fixture
def hub(server: tuple[Hub, Download]) -> Hub:
    vars(server[0]).update(vars(Hub(corpus(), address=server[0].address)))
    return server[0]


@pytest.fixture
def download(server: tuple[Hub, Download]) -> Download:
    return server[1]


def data_of(directory: Path) -> dict[str, bytes]:
    """Return the texts by name; files under way, which come and go, are not looked at."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*.zst")
    }


@pytest.mark.distributed
def test_the_files_the_commit_and_again(
    hub: Hub, download: Download, workshop: Workshop, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = download("--out", out)
    assert first.code == 0, first.err
    assert f"13 files, 0.00 GB of {REPOSITORY} at {COMMIT}, checked" in first.out
    expected = {name: content for name, content in hub.files.items() if name.startswith("train/")}
    assert data_of(out) == expected
    record = json.loads((out / "download.json").read_bytes())
    assert (record["repository"], record["revision"]) == (REPOSITORY, COMMIT)
    assert [file["name"] for file in record["files"]] == sorted(expected)
    assert not (out / "download.unfinished.json").exists()
    # The shards of a part of it state the commit.
    command = workshop.command(tmp_path / "shards", corpus=out / "train/chunk1")
    assert run(*command).code == 0
    origin = read_manifest(tmp_path / "shards").origin
    assert origin == {"source": "slimpajama", "repository": REPOSITORY, "revision": COMMIT}
    # Again: nothing is fetched. One file is damaged, one is lost: these two are.
    hub.requests.clear()
    assert download("--out", out).code == 0 and hub.requests == []
    damaged, lost = sorted(expected)[3:5]
    (out / damaged).write_bytes(bytes(len(expected[damaged])))
    (out / lost).unlink()
    assert download("--out", out).code == 0
    assert sorted(hub.requests) == [f"{damaged}@0", f"{lost}@0"] and data_of(out) == expected
    # More of the same commit is added to the record.
    more = ("--out", out, "--splits", "validation")
    assert download(*more).code == 0
    assert len(json.loads((out / "download.json").read_bytes())["files"]) == 14


@pytest.mark.distributed
def test_each_file_is_fetched_by_its_name_after_one_listing(
    hub: Hub, download: Download, tmp_path: Path
) -> None:
    """Names that a pattern, an address or a shell would read otherwise."""
    odd = ("[1].zst", "*.zst", "?.zst", "a b#%41&c.zst", "ü.zst", "[!x].zst")
    names = [f"train/odd/{name}" for name in odd]
    hub.files |= {name: rows_of(f"{name}.jsonl.zst") for name in names}
    names.append("train/chunk1/tiny.jsonl.zst")
    wanted = ("--out", tmp_path / "out", "--include", "train/odd/*", "--include", "*/tiny.*")
    done = download(*wanted)
    assert done.code == 0 and f"7 files, 0.00 GB of {REPOSITORY} at {COMMIT}" in done.out, done.err
    assert data_of(tmp_path / "out") == {name: hub.files[name] for name in names}
    assert sorted(hub.requests) == sorted(f"{name}@0" for name in names)
    assert hub.listings == 1


@pytest.mark.distributed
def test_killed_and_continued(hub: Hub, download: Download, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hub.hold_after = 6
    python = [sys.executable, "-m", "data_pipeline"]
    command = [*python, "download", "slimpajama", "--hub-id", REPOSITORY]
    environment = os.environ | {"HF_ENDPOINT": hub.address}
    process = subprocess.Popen([*command, "--out", str(out)], cwd=REPOSITORY_ROOT, env=environment)
    wait_until(lambda: len(data_of(out)) == 6, "six files")
    process.kill()
    process.wait()
    hub.hold_after = None
    hub.released.set()
    hub.requests.clear()
    assert not (out / "download.json").exists() and (out / "download.unfinished.json").exists()
    assert download("--out", out).code == 0
    assert len(hub.requests) == 13 - 6  # what was finished is not fetched again
    assert data_of(out) == {n: c for n, c in hub.files.items() if n.startswith("train/")}


@pytest.mark.distributed
def test_a_connection_that_breaks_in_a_file_is_taken_up_there(
    hub: Hub, download: Download, tmp_path: Path
) -> None:
    name = "train/chunk2/large.jsonl.zst"
    hub.files[name] = os.urandom(25 << 20)
    hub.cut[name] = 1
    wanted = ("--out", tmp_path / "out", "--include", name)
    assert download(*wanted).code == 0
    assert (tmp_path / "out" / name).read_bytes() == hub.files[name]
    first, second = hub.requests
    assert first == f"{name}@0" and int(second.rpartition("@")[2]) >= 10 << 20


@pytest.mark.distributed
def test_a_busy_hub_is_asked_again(hub: Hub, download: Download, tmp_path: Path) -> None:
    name = "train/chunk2/example_train_1.jsonl.zst"
    hub.busy |= {name: 1, "": 1}  # the file, and the first request
    wanted = ("--out", tmp_path / "out", "--include", "train/chunk2/*")
    done = download(*wanted)
    assert done.code == 0, done.err
    assert f"{REPOSITORY}: " in done.err and "503" in done.err and "again in 1 s" in done.err
    assert (tmp_path / "out" / name).read_bytes() == hub.files[name]


def test_errors_that_pass_are_those_of_network_and_hub() -> None:
    def answered(status: int) -> Exception:
        response = httpx2.Response(status, request=httpx2.Request("GET", "http://hub"))
        return errors.HfHubHTTPError(f"{status}", response=response)

    def caused(cause: Exception) -> Exception:
        error = errors.LocalEntryNotFoundError("is it on?")
        error.__cause__ = cause
        return error

    passing = (
        answered(429),
        answered(503),
        httpx2.ReadTimeout("slow"),
        caused(httpx2.ConnectError("no route")),
        RuntimeError("Data processing error: CAS service error"),
        ConnectionResetError(),
    )
    lasting = (
        answered(404),
        answered(403),
        caused(answered(403)),
        caused(errors.FileMetadataError("no ETag")),
        errors.OfflineModeIsEnabled("offline"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("a bad name"),
    )
    assert [passes(error) for error in passing] == [True] * len(passing)
    assert [passes(error) for error in lasting] == [False] * len(lasting)


def test_the_waits_begin_anew_where_files_came_meanwhile() -> None:
    left = 4
    said: list[str] = []

    def request() -> None:
        nonlocal left
        left -= len(said) != 1  # nothing comes after the first wait
        if left:
            raise RuntimeError("Data processing error: no route")

    repeat(request, "a", said.append, waits=(0, 0.01), left=lambda: left)
    waits = [line.partition("again in ")[2] for line in said]
    assert waits == ["0 s", "0.01 s", "0 s", "0 s"]
    assert said[0].startswith("a: Data processing error")
    left, said[:] = 9, []
    with pytest.raises(RuntimeError, match="no route"):
        repeat(request, "a", said.append, waits=(0,), left=lambda: 9)
    assert len(said) == 1


@pytest.mark.distributed
def test_a_moved_branch_does_not_mix_commits(hub: Hub, download: Download, tmp_path: Path) -> None:
    out = tmp_path / "out"
    into = ("--out", out)
    assert download(*into, "--include", "train/chunk1/*").code == 0
    hub.commit = COMMIT[::-1]
    said = download(*into, "--revision", "main").sentence()
    assert f"holds {REPOSITORY} at {COMMIT}" in said
    assert f"no revision {COMMIT}" in download("--out", out).sentence()


@pytest.mark.distributed
def test_the_users_mistakes_are_one_sentence(hub: Hub, download: Download, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, expected in (
        (("--hub-id", "acme/absent"), "the hub has no data set acme/absent"),
        (("--hub-id", "a/b/c"), "a/b/c is not a name like organisation/data-set"),
        (("--revision", "v9"), f"{REPOSITORY} has no revision v9"),
        (("--splits", "dev"), "no file that matches dev/*.jsonl.zst"),
        (("--fraction", "0"), "--fraction 0.0 must be above 0"),
    ):
        assert expected in download("--out", out, *arguments).sentence()
    assert "source 'pile' is unknown" in run("download", "pile", "--out", out).sentence()


@pytest.mark.slow
@pytest.mark.distributed
def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)

    def refused(**variables: str) -> Outcome:
        with client(**variables) as command:
            return command("download", "tinystories", "--out", tmp_path / "out")

    offline = refused(HF_HUB_OFFLINE="1").sentence()
    assert "cannot download roneneldan/TinyStories" in offline
    unreachable = refused(HF_ENDPOINT="http://127.0.0.1:9")
    *waits, sentence = unreachable.err.splitlines()
    assert [line.rpartition(" in ")[2] for line in waits] == ["1 s", "4 s", "10 s"]
    assert sentence.startswith("error: cannot download roneneldan/TinyStories: ")
    assert unreachable.code == 2 and "(by way of HF_ENDPOINT)" in sentence
    for proxy in ("socks5://127.0.0.1:9", "http://127.0.0.1:port"):
        sentence = refused(HTTPS_PROXY=proxy).sentence()
        assert "(by way of HTTPS_PROXY); correct the variable" in sentence


@pytest.mark.parametrize(
    ("source", "taken", "left"),
    [
        (
            "slimpajama",
            "train/chunk1/example_train_0.jsonl.zst",
            "validation/chunk1/example_0.jsonl.zst",
        ),
        ("openwebtext", "plain_text/train-00000-of-00080.parquet", "README.md"),
        (
            "tinystories",
            "data/train-00000-of-00004.parquet",
            "data/validation-00000-of-00001.parquet",
        ),
        ("fineweb-edu-10bt", FINEWEB, "data/CC-MAIN-2013-20/train-00000-of-00014.parquet"),
        ("fineweb-edu-100bt", "sample/100BT/000_00000.parquet", FINEWEB),
        ("dclm", DCLM, "README.md"),
        ("climbmix", "shard_06542.parquet", "README.md"),
    ],
)
def test_the_files_of_every_source(source: str, taken: str, left: str) -> None:
    files = [RemoteFile(name, 1, "", "") for name in (taken, left)]
    assert [file.name for file in Wanted().choose(files, SOURCES[source], "it")] == [taken]


def test_a_fraction_takes_the_same_files_of_every_chunk(tmp_path: Path) -> None:
    names = [
        f"train/chunk{chunk}/{number}.jsonl.zst" for chunk in range(1, 11) for number in range(40)
    ]
    files = [RemoteFile(name, 1, "", "") for name in names]

    def chosen(fraction: float, listing: list[RemoteFile]) -> list[str]:
        return [
            f.name for f in Wanted(fraction=fraction).choose(listing, SOURCES["slimpajama"], "here")
        ]

    fifth = chosen(0.2, files)
    assert chosen(0.2, files[::-1]) == fifth == sorted(fifth)
    assert [sum(f"chunk{chunk}/" in name for name in fifth) for chunk in range(1, 11)] == [8] * 10
    assert set(fifth) < set(chosen(0.5, files)) < set(chosen(1, files)) == set(names)
    assert len(chosen(0.001, files)) == 10


def rows_of(name: str) -> bytes:
    """A file with the columns that the corpora have beside the text."""
    texts = [f"{name} has words in line {line * 7919**7}" for line in range(300)]
    rows = [{"text": text, "url": "http://x.y", "metadata": {"a": "b"}} for text in texts]
    if name.endswith(".jsonl.zst"):
        return zstandard.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("fineweb-edu-10bt", [FINEWEB, FINEWEB.replace("000_", "001_")]),
        ("dclm", [DCLM, DCLM.replace("shard_0_of", "shard_1_of")]),
    ],
)
def test_a_named_corpus_is_interrupted_continued_and_tokenised(
    source: str, names: list[str], hub: Hub, download: Download, workshop: Workshop, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shards = tmp_path / "shards"
    hub.files = {name: rows_of(name) for name in names} | {"README.md": b"# card"}
    hub.broken.add(names[1])  # this one is no good and not kept; the other one is
    into = ("--out", out, "--workers", "1")
    refused = download(*into, source=source)
    sentence = refused.err.splitlines()[-1]
    assert refused.code == 2 and sentence.startswith("error: ")
    assert f"{names[1]} has the hash" in sentence and "download again" in sentence
    assert not (out / names[1]).exists() and not (out / "download.json").exists()
    hub.broken.clear()
    hub.requests.clear()
    done = download(*into, source=source)
    assert done.code == 0 and hub.requests == [f"{names[1]}@0"]
    corpus = SOURCES[source]
    assert f"licence: {corpus.licence}; key of the text: {corpus.text_key}" in done.out
    command = workshop.command(shards, corpus=out)
    assert run(*command, "--text-key", corpus.text_key).code == 0
    manifest = read_manifest(shards)
    assert sum(shard.documents for shard in manifest.shards) == 600
    assert manifest.origin == {"source": source, "repository": REPOSITORY, "revision": COMMIT}


def test_a_corpus_without_a_split_refuses_it() -> None:
    with pytest.raises(DataError, match=r"--splits validation: .* has no split but train"):
        Wanted(splits=("validation",)).choose([], SOURCES["dclm"], "it")


def test_the_page_has_every_corpus() -> None:
    page = (REPOSITORY_ROOT / "docs/data.md").read_text()
    for name, corpus in SOURCES.items():
        files = corpus.pattern.format(split="SPLIT")
        row = (
            f"| `{name}` | `{corpus.repository}` | `{files}` | {corpus.tokens} | {corpus.licence} |"
        )
        assert row in page
