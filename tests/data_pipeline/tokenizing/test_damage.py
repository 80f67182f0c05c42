"""A lost file is not a bad line: the rest is read, the file is named, the exit code says so."""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import Document, RecordReader, Reject
from data_pipeline.tokenizing.rejects import Limits
from data_pipeline.tokenizing.run import finish
from tests.data_pipeline.helpers import Workshop, run

COUNT = 3000


def lines(first: int, count: int) -> bytes:
    """Lines whose text compresses badly, so that a frame has several blocks."""
    texts = (f"{n} {n * 7919**9 % 10**60}" for n in range(first, first + count))
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read(path: Path) -> tuple[set[int], list[Reject]]:
    """(numbers of the documents, rejects)."""
    (file,) = find_inputs([path]).files
    reader = RecordReader(file, RecordKeys())
    records = list(reader)
    numbers = [int(record.text.split()[0]) for record in records if isinstance(record, Document)]
    assert len(numbers) == len(set(numbers))
    assert reader.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    return set(numbers), [record for record in records if isinstance(record, Reject)]


@functools.cache
def frames(checksum: bool) -> tuple[bytes, ...]:
    compressor = zstandard.ZstdCompressor(write_checksum=checksum)
    return tuple(compressor.compress(lines(n * COUNT, COUNT)) for n in range(4))


@pytest.mark.parametrize("checksum", [pytest.param(True, marks=pytest.mark.distributed), False])
@pytest.mark.parametrize("damage", ["zeros", "missing end", "missing beginning", "garbage between"])
def test_reading_continues_at_the_next_frame(tmp_path: Path, damage: str, checksum: bool) -> None:
    parts = [*frames(checksum)]
    path = tmp_path / "a.jsonl.zst"
    middle = len(parts[1]) // 2
    parts[1] = {
        "zeros": parts[1][:middle] + bytes(300) + parts[1][middle + 300 :],
        "missing end": parts[1][:middle],
        "missing beginning": parts[1][middle:],
        "garbage between": b"?" * 1000 + parts[1],
    }[damage]
    path.write_bytes(b"".join(parts))
    numbers, rejects = read(path)
    whole = set(range(COUNT)) | set(range(2 * COUNT, 4 * COUNT))
    assert whole <= numbers <= set(range(4 * COUNT))
    assert (numbers == set(range(4 * COUNT))) is (damage == "garbage between")
    reasons = {reject.reason for reject in rejects}
    assert reasons <= {"damaged", "bad_json", "invalid_utf8", "nul_byte"}
    lost = [reject for reject in rejects if reject.lost]
    assert lost and "reading continues at byte" in lost[0].detail


def test_frames_need_not_end_at_lines(tmp_path: Path) -> None:
    text = lines(0, 4 * COUNT)
    cut = [0, len(text) // 4 + 5, len(text) // 2 + 7, len(text)]
    parts = [zstandard.compress(text[a:b]) for a, b in itertools.pairwise(cut)]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(parts))
    assert read(path) == (set(range(4 * COUNT)), [])
    path.write_bytes(parts[0] + parts[1][: len(parts[1]) // 2] + parts[2])
    numbers, rejects = read(path)
    assert [reject.reason for reject in rejects] == ["damaged"]  # half a line is no line of its own
    assert set(range(text[: cut[2]].count(b"\n") + 1, 4 * COUNT)) <= numbers


def test_a_window_of_two_gigabytes(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    path = tmp_path / "a.jsonl.zst"
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(compressor.compress(lines(0, 10)) + compressor.flush())
    assert zstandard.get_frame_parameters(path.read_bytes()).window_size == 1 << 31
    assert read(path) == (set(range(10)), [])


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_members_one_after_the_other(tmp_path: Path, ending: str) -> None:
    pack = {"gz": gzip.compress, "xz": lzma.compress}[ending]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(
        pack(lines(0, COUNT)[:-9]) + pack(lines(0, COUNT)[-9:] + lines(COUNT, 5)) + bytes(8)
    )
    assert read(path) == (set(range(COUNT + 5)), [])
    path.write_bytes(pack(lines(0, COUNT))[:-500])
    numbers, (reject,) = read(path)
    assert reject.reason == "truncated" and numbers == set(range(len(numbers)))
    assert COUNT - 100 < len(numbers) < COUNT
    path.write_bytes(b"not compressed at all")
    assert [reject.reason for reject in read(path)[1]] == ["damaged"]


def _packed(ending: str, parts: list[bytes]) -> list[bytes]:
    pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}.get(ending, bytes)
    return [pack(part) for part in parts]


@pytest.mark.parametrize("ending", ["jsonl", "gz", "xz", "zst"])
def test_a_file_that_becomes_shorter_or_longer_while_it_is_read(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / ("a.jsonl" if ending == "jsonl" else f"a.jsonl.{ending}")
    first, second = _packed(ending, [lines(0, 20), lines(20, 10)])
    path.write_bytes(first + second)
    (file,) = find_inputs([path]).files
    for content in (first, first + second[:20] if ending == "jsonl" else first):
        path.write_bytes(content)  # it ends where a line, or a part that is packed by itself, ends
        records = list(RecordReader(file, RecordKeys()))
        assert sum(isinstance(record, Document) for record in records) == 20
        (lost,) = [record for record in records if isinstance(record, Reject)]
        assert lost.reason == "truncated"
    path.write_bytes(first + second + first)
    records = list(RecordReader(file, RecordKeys()))
    assert len(records) == 30 and all(isinstance(record, Document) for record in records)


def test_a_text_that_becomes_shorter_is_not_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"all of the text")
    (file,) = find_inputs([path]).files
    path.write_bytes(b"all of the")
    (lost,) = RecordReader(file, RecordKeys())
    assert isinstance(lost, Reject) and lost.reason == "truncated"
    assert lost.detail == "the input ends at byte 10 of 15; what follows is lost"


@pytest.mark.distributed
def test_damaged_inputs_end_with_exit_code_3_after_everything_else(
    workshop: Workshop, tmp_path: Path
) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for number, content in enumerate(frames(True)):
        (root / f"{number}.jsonl.zst").write_bytes(
            content[: len(content) // (2 if number == 1 else 1)]
        )
    out = tmp_path / "out"
    command = workshop.command(out, "--workers", "2", corpus=root)
    first = run(*command)
    assert first.code == 3 and "Traceback" not in first.err
    assert "damaged input 1.jsonl.zst: truncated: the file is cut short" in first.err
    assert "error: 1 inputs are damaged, everything else is finished" in first.err
    manifest = read_manifest(out)
    assert [entry.documents for entry in manifest.inputs][2:] == [COUNT, COUNT]
    assert [entry.partition(":")[0] for entry in manifest.damaged] == ["1.jsonl.zst"]
    assert run(*command).code == 3  # also when it is up to date
    assert run(*command, "--allow-damaged").code == 0
    shared = tmp_path / "tasks"
    tasks = workshop.command(shared, "--num-tasks", "2", "--task", corpus=root)
    task = run(*tasks, "1")
    assert task.code == 0 and "damaged input 1.jsonl.zst" in task.err
    assert run(*tasks, "0").code == 0
    assert run("merge-manifests", shared).code == 3
    assert run("merge-manifests", shared, "--allow-damaged").code == 0
    strict = workshop.command(tmp_path / "strict", "--strict", corpus=root)
    assert run(*strict).sentence().count("remove the file") == 1


def test_too_many_bad_lines_stop_the_run_and_name_the_files(
    workshop: Workshop, tmp_path: Path
) -> None:
    root = tmp_path / "in"
    out = tmp_path / "out"
    root.mkdir()
    (root / "good.jsonl").write_bytes(lines(0, 900))
    (root / "mixed.jsonl").write_bytes(lines(900, 90) + b"{bad\n" * 10)
    manifest, _ = workshop.tokenize(out, root)  # 1 % is allowed
    assert manifest.rejects == {"bad_json": 10} and manifest.inputs[1].rejected == 10
    with (root / "mixed.jsonl").open("ab") as stream:
        stream.write(b"{bad\n")
    out = tmp_path / "more"
    message = (
        r"11 of 1,001 lines are not documents, more than --max-reject-rate 0\.01 .*: "
        r"mixed\.jsonl \(11 of"
    )
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            workshop.tokenize(out, root)
    with pytest.raises(DataError, match=message):
        finish(out)
    assert not (out / "manifest.json").exists()
    _, unit_count = workshop.tokenize(out, root, limits=Limits(max_reject_rate=0.02))
    assert unit_count == 0  # the units that were made are not made again


def test_a_wrong_key_stops_the_run_before_its_end(workshop: Workshop, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_bytes(b'{"body": "x"}\n' * 6000)
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"12,000 of 12,000 lines are not documents"):
        workshop.tokenize(out, *sorted(tmp_path.glob("*.jsonl")))


def test_no_run_is_stopped_early_by_a_file_that_is_worse_than_the_rest(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Bad are 2 % of the first 10,000 lines, and half a per cent of all 40,000."""
    (tmp_path / "a.jsonl").write_bytes(lines(0, 9800) + b"{bad\n" * 200)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x"}\n' * 30_000)
    manifest, _ = workshop.tokenize(tmp_path / "out", *sorted(tmp_path.glob("*.jsonl")))
    assert manifest.rejects == {"bad_json": 200}


def test_train_tokenizer_names_its_damaged_inputs(tmp_path: Path) -> None:
    content = zstandard.ZstdCompressor().compress(lines(0, COUNT))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl.zst").write_bytes(content[: len(content) // 2])
    (tmp_path / "in/b.jsonl").write_bytes(lines(COUNT, 300))
    command = ("train-tokenizer", tmp_path / "in", "--out", tmp_path / "t", "--vocab-size", "270")
    for _ in range(2):  # trained, and up to date
        outcome = run(*command)
        said = outcome.err
        assert outcome.code == 3
        assert "damaged input a.jsonl.zst: the file is cut short; what follows is lost" in said
        assert "1 inputs are damaged" in said
    assert run(*command, "--allow-damaged").code == 0
    assert json.loads((tmp_path / "t.json").read_bytes())["damaged"]
