"""Text to tokenise, of every kind, and tokenizers, after damage."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import Document, RecordReader, Reject
from data_pipeline.tokenizer.tokenizer import identify, open_tokenizer
from tests.fuzz.damage import as_lines, damaged, damaged_json, odd_lines, right_or_refused

SET = "redpajama_set_name"
RECORDS = [
    {"text": f"{n} plain, é and \u2581 {'a b ' * n}", "meta": {SET: "prose" if n % 2 else "code"}}
    for n in range(9)
]
LINES = as_lines(RECORDS)


def parquet() -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(RECORDS), stream, row_group_size=4, write_page_checksum=True
    )
    return stream.getvalue()


PACKED: dict[str, bytes] = {
    "a.jsonl.zst": b"".join(
        zstandard.ZstdCompressor(write_checksum=True).compress(part)
        for part in (LINES[:400], LINES[400:])
    ),
    "a.jsonl.gz": gzip.compress(LINES, mtime=0),
    "a.jsonl.xz": lzma.compress(LINES),
    "a.parquet": parquet(),
}


def read(path: Path, content: bytes) -> tuple[list[Document], list[Reject]] | None:
    """Documents and rejects; None if the file was refused."""
    path.write_bytes(content)

    def everything() -> list[Document | Reject]:
        files = find_inputs([path]).files
        return [record for file in files for record in RecordReader(file, RecordKeys())]

    records = right_or_refused(everything)
    if isinstance(records, str):
        return None
    documents = [record for record in records if isinstance(record, Document)]
    return documents, [record for record in records if isinstance(record, Reject)]


def plain(line: bytes) -> str | None:
    """The text of a line, by strict JSON alone."""
    try:
        text = orjson.loads(line)["text"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
    return text if isinstance(text, str) and text else None


def split_lines(content: bytes) -> list[bytes]:
    """The lines of a file, by the old Mac's ends where they are not JSON by the others."""
    lines = []
    for line in content.split(b"\n"):
        try:
            orjson.loads(line)
        except orjson.JSONDecodeError:
            lines += line.split(b"\r") if b"\r" in line.strip() else [line]
        else:
            lines.append(line)
    return lines


@given(st.one_of(damaged(LINES), odd_lines(RECORDS), st.binary(max_size=200)))
@example(b"[" * 100_000 + b"\n" + LINES)
def test_every_line_is_a_document_or_named(folder: Path, content: bytes) -> None:
    parsed = read(folder / "a.jsonl", content)
    if parsed is None:
        assert not content
        return
    documents, rejects = parsed
    lines = split_lines(content.removeprefix(b"\xef\xbb\xbf"))
    reported_lines = {document.id.rpartition(":")[2] for document in documents}
    reported_lines |= {str(reject.line) for reject in rejects if not reject.kept}
    assert reported_lines == {
        str(number) for number, line in enumerate(lines, start=1) if line.strip()
    }
    texts = [document.text for document in documents]
    strict = [text for line in lines if (text := plain(line)) is not None]
    remaining = iter(texts)
    sources = [json.loads(line).get("meta") for line in lines if plain(line) is not None]
    if all(
        isinstance(meta, dict) and isinstance(meta.get(SET), str) and meta[SET] for meta in sources
    ):
        assert all(text in remaining for text in strict)


@given(st.sampled_from(sorted(PACKED)), st.data())
def test_no_loss_of_a_packed_file_is_silent(folder: Path, name: str, data: st.DataObject) -> None:
    changed = data.draw(st.one_of(damaged(PACKED[name]), st.binary(max_size=80)))
    parsed = read(folder / name, changed)
    if parsed is None:
        return
    documents, rejects = parsed
    lost = [reject for reject in rejects if not reject.kept]  # each text has a kept one, U+2581
    checked = not name.endswith(".parquet")  # whose footer has no checksum
    if len(documents) < len(RECORDS) and changed:
        # Where a frame is gone, half a record is left.
        excused = not checked and (rejects or len(changed) < len(PACKED[name]))
        assert lost or excused
    texts = {record["text"] for record in RECORDS}
    if checked and not lost:
        assert {document.text for document in documents} <= texts


@given(st.one_of(damaged("first\n\nsecond é\n\n\nthird".encode()), st.binary(max_size=200)))
def test_text_files(folder: Path, content: bytes) -> None:
    parsed = read(folder / "a.txt", content)
    assert parsed is None or parsed[0] or parsed[1]
    other = content[:1] in (b"\xff", b"\xfe") or min(content, default=7) < 7  # UTF-16, perhaps
    if parsed and parsed[0] and not other:
        text = content.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        assert all(document.text in text for document in parsed[0])


@pytest.fixture(scope="module")
def model() -> bytes:
    stream = io.BytesIO()
    lines = iter([record["text"] for record in RECORDS] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=stream,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        num_threads=1,
    )
    return stream.getvalue()


@given(st.data())
def test_sentencepiece_models(folder: Path, model: bytes, data: st.DataObject) -> None:
    path = folder / "t.model"
    path.write_bytes(
        data.draw(st.one_of(damaged(model), damaged(model[-600:]), st.binary(max_size=80)))
    )
    opened = right_or_refused(lambda: open_tokenizer(path))
    right_or_refused(lambda: identify(path, allow_lossy=True))
    if not isinstance(opened, str):
        ids = opened.encode(["a plain text é"])
        opened.lost(["a plain text é"], ids)


@pytest.mark.parametrize("piece", [b"<0xFB>", b"<unk>"])
def test_a_piece_that_is_no_text(folder: Path, model: bytes, piece: bytes) -> None:
    path = folder / "t.model"
    path.write_bytes(model.replace(piece, b"\xbc" + piece[1:], 1))
    assert right_or_refused(lambda: open_tokenizer(path)) is not None
    path.write_bytes(model[model.index(piece) - 2 :])
    assert right_or_refused(lambda: open_tokenizer(path)) is not None


HUGGING_FACE: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 0,
            "content": "<eod>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {
        "type": "WordLevel",
        "vocab": {"<eod>": 0, "a": 1, "b": 2, "<unk>": 3},
        "unk_token": "<unk>",
    },
}


@given(
    damaged_json(json.dumps(HUGGING_FACE).encode()),
    damaged_json(b'{"eos_token": "<eod>", "bos_token": {"content": "a"}}'),
)
def test_hugging_face_tokenizers(folder: Path, content: bytes, names: bytes) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    path.with_name("tokenizer_config.json").write_bytes(names)
    assert right_or_refused(lambda: open_tokenizer(path)) is not None
    assert right_or_refused(lambda: identify(path)) is not None


def test_the_valid_files_are_read_whole(folder: Path) -> None:
    for name, content in (PACKED | {"a.jsonl": LINES}).items():
        documents, rejects = read(folder / name, content) or ([], [])
        assert [document.text for document in documents] == [record["text"] for record in RECORDS]
        assert all(reject.kept for reject in rejects)
