"""Reading documents: formats, keys, parts of files, and lines and files that are not right."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.io.files import LFS_POINTER
from data_pipeline.sources.cutting import TEXT_CHARACTERS, Cutter
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import Document, RecordReader, Reject, read_documents
from tests.data_pipeline.helpers import write_texts

RECORDS = [
    {"text": "first\nwith a line", "meta": {"redpajama_set_name": "Books"}},
    {"text": "naïve – 数字", "meta": {"redpajama_set_name": "Web"}},
    {"text": "no source"},
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
EXPECTED = [("first\nwith a line", "Books"), ("naïve – 数字", "Web"), ("no source", "default")]


def records(path: Path, keys: RecordKeys | None = None) -> list[Document | Reject]:
    (file,) = find_inputs([path]).files
    return list(RecordReader(file, keys or RecordKeys()))


def documents(path: Path, keys: RecordKeys | None = None) -> list[Document]:
    parsed = [record for record in records(path, keys) if isinstance(record, Document)]
    (file,) = find_inputs([path]).files
    assert parsed == list(read_documents(file, keys or RecordKeys()))
    return parsed


def rejects(path: Path, keys: RecordKeys | None = None) -> list[Reject]:
    return [record for record in records(path, keys) if isinstance(record, Reject)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", LINES.rstrip(b"\n")),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n")),
        ("a.jsonl", LINES.replace(b"\n", b"\r")),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        # Two frames, the first one ending inside a line: readers that stop at the first frame lose
        # the rest.
        ("a.jsonl.zst", zstandard.compress(LINES[:30]) + zstandard.compress(LINES[30:])),
    ],
)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    parsed = documents(tmp_path / name)
    assert [(document.text, document.source) for document in parsed] == EXPECTED
    assert [document.id for document in parsed] == [f"{name}:1", f"{name}:2", f"{name}:3"]
    assert rejects(tmp_path / name) == []


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [*RECORDS, {"text": None}, {"text": ""}] * 400  # more than one batch of rows
    meta = pyarrow.struct([("redpajama_set_name", pyarrow.string())])
    schema = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string()), ("meta", meta)])
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows, schema=schema), path, row_group_size=300
    )
    parsed = documents(path)
    assert [(document.text, document.source) for document in parsed] == EXPECTED * 400
    assert parsed[-1].id == "a.parquet:1998"
    assert [(r.line, r.reason) for r in rejects(path)[-2:]] == [
        (1999, "missing_text"),
        (2000, "empty_text"),
    ]
    with pytest.raises(
        DataError, match='has no column "body", it has id, text, meta; name the column'
    ):
        records(path, RecordKeys(text="body"))
    path.write_bytes(path.read_bytes()[:-100])
    assert [reject.reason for reject in rejects(path)] == ["damaged"]


def test_parquet_with_invalid_utf8(tmp_path: Path) -> None:
    raw = pyarrow.array([b"good", b"b\xffd", b"fine"], type=pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert [document.text for document in documents(tmp_path / "a.parquet")] == ["good", "fine"]
    assert [(r.line, r.reason) for r in rejects(tmp_path / "a.parquet")] == [(2, "invalid_utf8")]


def test_of_a_struct_only_the_wanted_field_is_converted(tmp_path: Path) -> None:
    far = pyarrow.array([0, 3 * 10**17], pyarrow.int64()).cast(pyarrow.timestamp("us"))
    name = pyarrow.array(["Books", "Web"])
    meta = pyarrow.StructArray.from_arrays([far, name], ["crawled", "redpajama_set_name"])
    table = pyarrow.table({"text": ["a", "b"], "meta": meta, "far": far})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    parsed = documents(tmp_path / "a.parquet")
    assert [(document.text, document.source) for document in parsed] == [
        ("a", "Books"),
        ("b", "Web"),
    ]
    first, second = records(tmp_path / "a.parquet", RecordKeys(text="far"))
    assert isinstance(first, Reject) and isinstance(second, Reject)
    assert (first.reason, second.reason) == ("text_not_string", "bad_row")
    assert second.line == 2 and "a value that Python does not have" in second.detail


def test_text_file_is_one_document_and_blank_lines_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    assert [document.text for document in documents(tmp_path / "a.txt")] == ["one\n\ntwo"]
    (tmp_path / "b.jsonl").write_bytes(b"\n" + LINES + b"\n  \n")
    assert len(documents(tmp_path / "b.jsonl")) == 3 and not rejects(tmp_path / "b.jsonl")
    (tmp_path / "c.txt").write_bytes(b"ok\n\nbad \xff")
    assert [document.text for document in documents(tmp_path / "c.txt")] == ["ok"]
    (reject,) = rejects(tmp_path / "c.txt")
    assert reject.lost and reject.detail.startswith("byte 8 of the file is not valid UTF-8; ")


@pytest.mark.parametrize("end", [b"\n\n", b"\n", b"\r\n", b"\r"])
def test_a_long_text_is_cut_at_blank_lines_or_else_at_lines_by_whatever_they_end(
    tmp_path: Path, end: bytes
) -> None:
    lines = [f"sentence {number} " + "word " * 100 for number in range(100)]
    (tmp_path / "novel.txt").write_bytes(end.join(line.encode() for line in lines) + end[:1])
    parts = documents(tmp_path / "novel.txt")
    cut = "\n\n" if end == b"\n\n" else "\n"
    assert cut.join(part.text for part in parts) == cut.join(lines) + "\n"
    assert len(parts) == 4 and max(len(part.text) for part in parts) <= TEXT_CHARACTERS
    assert [part.id for part in parts] == [f"novel.txt:{number}" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("abc", ["abc"]),
        ("", []),
        ("ab\n\ncd\n \t\n\nef", ["ab\n\ncd", "ef"]),
        ("abcdefghijkl\n\nab\nabcdefg", ["abcdefgh", "ijkl", "ab", "abcdefg"]),
        ("a b. cdefg hij", ["a b.", "cdefg", "hij"]),
        ("一二三。四五六七八。九", ["一二三。", "四五六七八。九"]),
        ("ab\ncd\nef\ngh\n", ["ab\ncd\nef", "gh\n"]),
        ("\n \nabcdefghijkl\n", ["\n", "\nabcdefg", "hijkl"]),
        ("\n\nabcdefgh\n\n", ["\n\nabcdef", "gh"]),
    ],
)
def test_the_cuts_of_a_text(text: str, parts: list[str]) -> None:
    assert list(Cutter(limit=8).feed(text, last=True)) == parts


def test_the_cuts_of_a_text_do_not_depend_on_how_it_comes() -> None:
    random = Random(1)
    for letters in ["ab \n", "abc. 。\n", "a\n\t ", "a.! ", "abcdefgh\n"] * 100:
        text = "".join(random.choices(letters, k=random.randrange(120)))
        limit = random.choice([1, 2, 5, 13, 40])
        whole = list(Cutter(limit).feed(text, last=True))
        cutter = Cutter(limit)
        parts = [part for letter in text for part in cutter.feed(letter)]
        assert parts + list(cutter.feed("", last=True)) == whole


def test_a_bad_line_with_returns_of_the_carriage_is_one_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {number}"}).encode() for number in range(9)]
    lines[2] = b'{"text": "raw\rcarriage\rreturn"}'
    lines[4] = b'[{"text": "a"},\r{"text": "b"'
    lines[6] = lines[6] + b"\r" + lines[7] + b"\r{bad}"  # lines of the old Mac, the last one bad
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    assert [(r.line, r.reason) for r in rejects(tmp_path / "a.jsonl")] == [
        (3, "bad_json"),
        (5, "bad_json"),
        (9, "bad_json"),
    ]
    assert len(documents(tmp_path / "a.jsonl")) == 8


def test_an_encoding_is_not_guessed_for_every_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1") * 102)
    details = [reject.detail.partition("; ")[2] for reject in rejects(tmp_path / "a.jsonl")]
    assert details[99].startswith("it looks like") and details[100:] == ["see the lines before"] * 2


def test_keys_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"body": {"raw": "hello"}, "from": "mail"}\n{"body": {"raw": "x"}}\n'
    )
    first, second = documents(tmp_path / "a.jsonl", RecordKeys("body.raw", "from", "letters"))
    assert (first.text, first.source) == ("hello", "mail")
    assert (second.text, second.source) == ("x", "letters")


_MAP = pyarrow.map_(pyarrow.string(), pyarrow.string())
_DOTTED = {"doc.text": "hello", "meta.redpajama_set_name": "Books"}


@pytest.mark.parametrize(
    ("row", "schema", "keys"),
    [
        (_DOTTED, None, RecordKeys("doc.text")),
        (
            {"doc": {"text.raw": "hello"}, "a.b": {"c": "Books"}},
            None,
            RecordKeys("doc.text.raw", "a.b.c"),
        ),
        (
            {"text": "hello", "meta": [("redpajama_set_name", "Books")]},
            {"meta": _MAP},
            RecordKeys(),
        ),
        (
            {"doc.m": [("text", "hello")], "s": "Books"},
            {"doc.m": _MAP},
            RecordKeys("doc.m.text", "s"),
        ),
        (
            {"doc": {"text": None}, "doc.text": "hello", "s": "Books"},
            None,
            RecordKeys("doc.text", "s"),
        ),
    ],
)
def test_columns_and_keys_with_dots_and_maps(
    tmp_path: Path, row: dict, schema: dict | None, keys: RecordKeys
) -> None:
    columns = {
        name: pyarrow.array([value], (schema or {}).get(name)) for name, value in row.items()
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    as_json = {
        name: dict(value) if schema and name in schema else value for name, value in row.items()
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(as_json))
    for name in ("a.parquet", "a.jsonl"):
        (document,) = documents(tmp_path / name, keys)
        assert (document.text, document.source) == ("hello", "Books"), name


HOSTILE = [
    (b'{"text": "cut', "bad_json"),
    (b"[" * 100_000, "bad_json"),
    (b'{"text": NaN}', "bad_json"),
    (b'{"text": "\\ud800"}', "lone_surrogate"),
    (b'{"text": "\xff"}', "invalid_utf8"),
    (b"\xed\xa0\x80", "invalid_utf8"),
    (b'{"text": "a\x00b"}', "nul_byte"),
    (b"\x00" * 500, "nul_byte"),
    (b'{"txt": "x"}', "missing_text"),
    (b'{"text": null}', "missing_text"),
    (b'["text"]', "missing_text"),
    (b'{"text": 5}', "text_not_string"),
    (b'{"text": ["x"]}', "text_not_string"),
    (b'{"text": "x", "meta": {"redpajama_set_name": 7}}', "bad_source"),
    (b'{"text": ""}', "empty_text"),
]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.zst", "jsonl.gz"])
def test_hostile_lines_are_named_by_reason_and_the_rest_is_intact(
    tmp_path: Path, ending: str
) -> None:
    content = b"".join(LINES + line + b"\n" for line, _ in HOSTILE) + LINES
    pack = {"jsonl": bytes, "jsonl.zst": zstandard.compress, "jsonl.gz": gzip.compress}[ending]
    path = tmp_path / f"a.{ending}"
    path.write_bytes(pack(content))
    assert [(d.text, d.source) for d in documents(path)] == EXPECTED * (len(HOSTILE) + 1)
    expected = [(4 * number, reason) for number, (_, reason) in enumerate(HOSTILE, start=1)]
    assert [(r.line, r.reason) for r in rejects(path)] == expected
    assert not any(reject.kept for reject in rejects(path))


def test_unusual_documents_are_kept_and_named(tmp_path: Path) -> None:
    texts = ["nul \u0000", "block \u2581", "x" * 10_000_000, "数" * 3_400_000, "y" * 9_999_999]
    path = write_texts(tmp_path / "a.jsonl", texts)
    assert [document.text for document in documents(path)] == texts
    entries = [(reject.line, reject.reason, reject.kept) for reject in rejects(path)]
    reasons = ["contains_nul", "contains_u2581", "long_document", "long_document"]
    assert entries == [(line, reason, True) for line, reason in enumerate(reasons, start=1)]


def test_progress_through_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(LINES * 1000))
    (file,) = find_inputs([path]).files
    reader = RecordReader(file, RecordKeys())
    assert reader.input_bytes() == 0
    assert len(list(reader)) == 3000
    assert (reader.input_bytes(), reader.lines) == (file.size, 3000)


def test_a_file_that_cannot_be_read_is_an_error_and_no_hostile_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (file,) = find_inputs([tmp_path / "a.jsonl"]).files
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.jsonl: No such file"):
        list(RecordReader(file, RecordKeys()))


PROSE = "Größe – naïve, «ça va»?\nДа\n" * 40


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_text_in_an_encoding_that_can_be_told_is_read(
    tmp_path: Path, encoding: str, mark: str
) -> None:
    if encoding.startswith("utf-32") and not mark:
        pytest.skip("UTF-32 is told by its mark alone")
    (tmp_path / "a.txt").write_bytes(f"{mark}{PROSE}".encode(encoding))
    assert [document.text for document in documents(tmp_path / "a.txt")] == [PROSE]
    (tmp_path / "b.jsonl").write_bytes(f"{mark}{LINES.decode()}".encode(encoding))
    assert [document.text for document in documents(tmp_path / "b.jsonl")] == [
        text for text, _ in EXPECTED
    ]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_of_other_scripts_without_a_mark(tmp_path: Path, encoding: str) -> None:
    text = "Всё смешалось в доме Облонских, и жена узнала.\n" * 40
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert [document.text for document in documents(tmp_path / "a.txt")] == [text]
    (tmp_path / "b.txt").write_bytes(text.upper().encode(encoding))
    assert documents(tmp_path / "b.txt") == []
    (reject,) = rejects(tmp_path / "b.txt")
    assert reject.lost and "of the file are control characters" in reject.detail


@pytest.mark.parametrize(
    ("text", "encoding", "remedy"),
    [
        ("Der Großvater saß in der Küche und erzählte. ", "latin-1", "-f WINDOWS-1252 -t"),
        ("Le vieux château était situé près de l’été. ", "cp1252", "-f WINDOWS-1252 -t"),
        ("Stary człowiek siedział w kuchni i wrócił, żeby. ", "cp1250", "-f WINDOWS-1250 -t"),
        ("Всё смешалось в доме Облонских, и жена узнала. ", "cp1251", "-f WINDOWS-1251 -t"),
    ],
)
def test_another_encoding_is_named_with_the_remedy(
    tmp_path: Path, text: str, encoding: str, remedy: str
) -> None:
    (tmp_path / "a.txt").write_bytes((text * 40).encode(encoding))
    (reject,) = rejects(tmp_path / "a.txt")
    assert reject.reason == "damaged" and "is not valid UTF-8; it looks like" in reject.detail
    assert remedy in reject.detail
    record = json.dumps({"text": text * 4}, ensure_ascii=False)
    (tmp_path / "b.jsonl").write_bytes(record.encode(encoding))
    assert remedy in rejects(tmp_path / "b.jsonl")[0].detail


def tar_archive() -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("a.txt")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"words"))
    return archive.getvalue()


TAR = "the file is a tar archive; unpack it first"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"%PDF-1.4 ...", "the file is a PDF, not text; convert it: pdftotext"),
        ("a.txt", b"PK\x03\x04\x00\x00", "a ZIP archive (a .docx and an .epub is one too)"),
        ("a.txt", gzip.compress(b"text", mtime=0), "packed by gzip; name it by what is inside"),
        ("a.txt", b"\xff\x00\x01\x02\x03" * 100, "it does not look like text of any encoding"),
        ("a.txt", tar_archive(), TAR),
        ("a.txt.gz", gzip.compress(tar_archive()), TAR),
        ("a.jsonl.zst", zstandard.compress(tar_archive()), TAR),
        ("a.txt", LFS_POINTER + b"v1\n", "the file is a pointer of Git LFS; fetch the file"),
        ("a.jsonl", LFS_POINTER + b"v1\n", "the file is a pointer of Git LFS; fetch the file"),
    ],
    ids=lambda value: "",
)
def test_another_kind_of_file_named_as_text_is_called_what_it_is(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert documents(tmp_path / name) == []
    (reject,) = rejects(tmp_path / name)
    assert reject.lost and expected in reject.detail


def test_packed_text_is_text(tmp_path: Path) -> None:
    packed = gzip.compress("one\r\ntwo".encode("utf-16"))
    (tmp_path / "a.md.gz").write_bytes(packed)
    assert [document.text for document in documents(tmp_path / "a.md.gz")] == ["one\ntwo"]
    (tmp_path / "a.md.gz").write_bytes(packed[:-9])
    assert [reject.reason for reject in rejects(tmp_path / "a.md.gz")] == ["truncated"]
    (tmp_path / "a.md.gz").write_bytes(b"\x00" * len(packed))  # as a crashed disk leaves it
    assert [reject.reason for reject in rejects(tmp_path / "a.md.gz")] == ["damaged"]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_of_packed_text_that_is_cut_short_the_beginning_is_read(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    rows = [f"{n * 7919**9 % 10**30}" for n in range(20_000)]  # which compress badly
    packed = pack("\n\n".join(["text", *rows]).encode())
    path = tmp_path / f"a.txt.{'gz' if pack is gzip.compress else 'zst'}"
    path.write_bytes(packed)
    everything = documents(path)
    path.write_bytes(packed[: len(packed) * 2 // 3])
    parsed = documents(path)
    (reject,) = rejects(path)
    assert (reject.reason, reject.line) == ("truncated", len(parsed) + 1)
    whole = parsed[:-1]
    assert whole == everything[: len(whole)]
    assert everything[len(whole)].text.startswith(parsed[-1].text)
    words = "\n\n".join(document.text for document in parsed).split("\n\n")[1:]
    assert words == rows[: len(words)] and len(words) > 10_000


def test_a_file_is_not_held_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text\n" + f"{'a line of the file that is read. ' * 100}\n" * 10_000)
    (file,) = find_inputs([path]).files
    tracemalloc.start()
    count = sum(1 for _ in RecordReader(file, RecordKeys()))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 1_000 and most < path.stat().st_size / 2


WHOLE_JSON = (
    b'[\n{"text": "a"},\n{"text": "b"}\n]\n',
    b'[{"text": "a"}, {"text": "b"}]\n',
    b' [ {"text": "a"},\n{"text": "b"}]\n',
    b'{\n  "text": "a"\n}\n',
)


@pytest.mark.parametrize("content", WHOLE_JSON)
def test_json_as_a_whole_is_told_by_its_content(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(
        DataError, match=r"JSON as a whole; write one record a line: jq -c '\.\[\]'"
    ):
        find_inputs([tmp_path / "a.json"])
    for name in ("b.jsonl", "b.json.gz"):
        packed = gzip.compress(content) if name.endswith("gz") else content
        (tmp_path / name).write_bytes(packed)
        assert documents(tmp_path / name) == []
        (reject,) = rejects(tmp_path / name)
        assert reject.lost and reject.detail.startswith("the file is JSON as a whole")


@pytest.mark.parametrize("odd", [b"[]", b'[{"text": "a"}]', b"{", b"[{"])
def test_a_list_among_records_a_line_is_one_odd_record(tmp_path: Path, odd: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(odd + b"\n" + LINES)
    assert [(d.text, d.source) for d in documents(tmp_path / "a.jsonl")] == EXPECTED
    assert rejects(tmp_path / "a.jsonl")[0].line == 1


def test_json_with_a_record_a_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(LINES)
    assert [(d.text, d.source) for d in documents(tmp_path / "a.json")] == EXPECTED
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}, indent=2))
    inputs = find_inputs([tmp_path])
    assert [file.name for file in inputs.files] == ["a.json"]
    assert [entry.name for entry in inputs.passed_over] == ["config.json"]


@pytest.mark.parametrize(
    "content",
    [
        "Größe und Maß – so fängt es an.\n".encode() * 30 + "später".encode("cp1252"),
        b"Gr\xf6\xdfe" + " und Maß – so geht es weiter.\n".encode() * 30,
        ("数字 " * 20).encode() + b"na\xefve",
    ],
)
def test_utf_8_with_a_part_in_another_encoding_is_not_to_be_converted(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "' + content.replace(b"\n", b" ") + b'"}\n')
    for name in ("a.txt", "b.jsonl"):
        detail = rejects(tmp_path / name)[0].detail
        assert "other letters are UTF-8, so a part is in another encoding" in detail
        assert "iconv -c -f UTF-8 -t UTF-8" in detail


def test_of_several_keys_the_first_with_text_is_taken(tmp_path: Path) -> None:
    lines = '{"text": "", "content": "a"}\n{"body": "b"}\n{"text": "c", "body": "d"}\n{"x": 1}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    keys = RecordKeys(text="text|content|body")
    assert [document.text for document in documents(tmp_path / "a.jsonl", keys)] == ["a", "b", "c"]
    (reject,) = rejects(tmp_path / "a.jsonl", keys)
    assert reject.detail == 'no "text", "content" or "body" in the record, which has x'
