"""SentencePiece: lossless on text it never saw, deterministic, honest in its report."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.files import sha256_file
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.sampling import LowestNumbers, sample_number
from data_pipeline.tokenizer import train
from data_pipeline.tokenizer.tokenizer import check_report, identify, load_tokenizer, read_model
from data_pipeline.tokenizer.train import TrainerSettings, round_scores, train_tokenizer
from tests.data_pipeline.helpers import REPOSITORY, Workshop, all_documents, run, write_texts


def trained(corpus: Path, out: Path, **settings: Any) -> tuple[dict[str, Any], bool]:
    """Report of a tokenizer of all files of a corpus, and whether it was trained now."""
    files = find_inputs([corpus]).files
    return train_tokenizer(files, out, TrainerSettings(**settings), RecordKeys())


@pytest.mark.parametrize(
    "text",
    [
        "  two spaces,  a tab\tand\n\n\n  an indented line \r\n",
        "def f(x):\n    return {'a': [1, 22, 333]}\n\n\n",
        "naïve café – 数字 🙂 \u200b e\u0301 \ufb01",
        "<s> </s> <unk> <0x41> are text here",
        "nul \u0000 and bell \u0007",
        "x" * 20_000,
        " ",
        "\n",
    ],
)
def test_hostile_text_survives(workshop: Workshop, text: str) -> None:
    processor = load_tokenizer(workshop.model)
    ids = processor.encode(text)
    assert processor.decode(ids) == text
    assert not {0, 1, 2}.intersection(ids), "reserved ids must never come from text"


def test_report_identity_and_up_to_date(workshop: Workshop) -> None:
    report = json.loads(workshop.model.with_suffix(".json").read_bytes())
    assert report["round_trip_failures"] == 0
    assert report["held_out_documents"] > 3
    assert 2 < report["bytes_per_token"] < 6
    assert report["sha256"] == sha256_file(workshop.model)
    identity = identify(workshop.model)
    assert (identity.vocab_size, identity.model_type) == (1000, "bpe")
    assert (identity.unk_id, identity.bos_id, identity.eos_id, identity.pad_id) == (0, 1, 2, -1)
    assert identity.eod_id == identity.eos_id
    settings = {"vocab_size": 1000, "sample_bytes": 400_000}
    assert trained(workshop.corpus, workshop.model.with_suffix(""), **settings) == (report, False)


def test_scores_of_a_unigram_model_are_rounded(unigram_model: Path) -> None:
    report = json.loads(unigram_model.with_suffix(".json").read_bytes())
    assert report["sha256"] == sha256_file(unigram_model), "rounded after it was hashed"
    pieces = [piece for piece in read_model(unigram_model).pieces if piece.type == piece.NORMAL]
    assert len(pieces) > 300 and all(
        piece.score * 64 == round(piece.score * 64) for piece in pieces
    )
    assert len({piece.score for piece in pieces}) > 100
    content = unigram_model.read_bytes()
    assert round_scores(content) == content


@pytest.mark.distributed
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_training_is_deterministic(
    workshop: Workshop, unigram_model: Path, other_model: Path, tmp_path: Path, model_type: str
) -> None:
    first = {"unigram": unigram_model, "bpe": other_model}[model_type]
    report = json.loads(first.with_suffix(".json").read_bytes())
    size = report["settings"]["sample_bytes"]
    sizes = {"vocab_size": identify(first).vocab_size, "sample_bytes": size}
    settings = {"model_type": model_type, **sizes}
    trained(workshop.corpus, tmp_path / "other", **settings)
    assert (tmp_path / "other.model").read_bytes() == first.read_bytes()
    assert (tmp_path / "other.json").read_bytes() == first.with_suffix(".json").read_bytes()
    assert identify(first).model_type == model_type
    assert report["round_trip_failures"] == 0
    # The sample is near what was asked for: not the whole corpus.
    assert size <= report["training_bytes"] < 2 * size
    # Tokenizers of other settings of the trainer, such as unrounded scores, are not up to date.
    assert not trained(workshop.corpus, tmp_path / "other", **settings)[1]
    report["settings"]["trainer"].pop("score_steps" if model_type == "unigram" else "split_digits")
    (tmp_path / "other.json").write_text(json.dumps(report))
    assert trained(workshop.corpus, tmp_path / "other", **settings)[1]


def test_very_long_lines_are_learned_from(workshop: Workshop, tmp_path: Path) -> None:
    # One line of 40,000 bytes a document: SentencePiece alone would skip it and learn nothing.
    texts = [f"{number} " + "wonderful " * 4000 for number in range(200)]
    path = write_texts(tmp_path / "long.jsonl", texts)
    trained(path, tmp_path / "long", vocab_size=290, model_type="bpe", sample_bytes=10_000_000)
    processor = load_tokenizer(tmp_path / "long.model")
    assert len(processor.encode("wonderful wonderful wonderful ")) < 8


def test_of_few_documents_one_is_held_out(tmp_path: Path) -> None:
    words = "the quick brown fox jumps over a lazy dog "
    path = write_texts(tmp_path / "few.jsonl", [f"{number} " + words * 200 for number in range(3)])
    settings = {"vocab_size": 300, "model_type": "bpe", "sample_bytes": 100_000}
    report, _ = trained(path, tmp_path / "few", **settings)
    assert report["held_out_documents"] == 1


@pytest.mark.parametrize(
    ("vocab_size", "message"), [(50, "give 518 or more"), (60_000, "too high")]
)
def test_impossible_sizes(
    workshop: Workshop, tmp_path: Path, vocab_size: int, message: str
) -> None:
    with pytest.raises(DataError, match=rf"--vocab-size {vocab_size}\b.*{message}"):
        trained(workshop.corpus, tmp_path / "t", vocab_size=vocab_size, sample_bytes=50_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_text_of_more_characters_than_the_vocabulary_has_the_rest_in_bytes(
    model_type: str, tmp_path: Path
) -> None:
    """As Chinese or Japanese have: the second half of the characters is rare here."""
    characters = [chr(0x4E00 + number) for number in range(1200)]
    draw = random.Random(0)
    weights = [8] * 600 + [1] * 600
    words = ["".join(draw.choices(characters, weights, k=3)) for _ in range(1500)]
    documents = ["".join(draw.choices(words, k=300)) for _ in range(40)]
    path = write_texts(tmp_path / "text.jsonl", documents)
    settings = {"vocab_size": 1024, "model_type": model_type}
    report, _ = trained(path, tmp_path / "t", **settings)
    assert report["vocab_size"] == 1024 and report["round_trip_failures"] == 0
    assert 0.5 < report["character_coverage"] < 0.9
    processor = load_tokenizer(tmp_path / "t.model")
    tokens = {processor.id_to_piece(number) for number in range(1024)}
    assert sum(character in tokens for character in characters) == (1024 - 259) // 2
    assert processor.decode(processor.encode("".join(characters))) == "".join(characters)
    assert not trained(path, tmp_path / "t", **settings)[1]


def test_models_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "junk.model").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"junk\.model is not a SentencePiece model"):
        identify(tmp_path / "junk.model")
    with pytest.raises(DataError, match=r"absent\.model"):
        identify(tmp_path / "absent.model")


@pytest.mark.distributed
def test_the_sample_is_spread_over_files_and_sources_and_not_their_beginnings(
    workshop: Workshop, tmp_path: Path
) -> None:
    settings = {"vocab_size": 400, "sample_bytes": 300_000}
    report, _ = trained(workshop.corpus, tmp_path / "a", **settings)
    sizes: dict[str, int] = {}
    for document in all_documents(workshop.corpus):
        sizes[document.source] = sizes.get(document.source, 0) + len(document.text.encode())
    for source, size in report["training_bytes_by_source"].items():
        share = size / report["training_bytes"]
        assert share == pytest.approx(sizes[source] / sum(sizes.values()), abs=0.08)
    assert sum(report["training_bytes_by_source"].values()) == report["training_bytes"]
    # The documents decide, not how they are grouped, named or ordered: one file, backwards, is the
    # same.
    lines = [
        json.dumps({"text": d.text, "meta": {"redpajama_set_name": d.source}})
        for d in all_documents(workshop.corpus)
    ]
    (tmp_path / "one.jsonl").write_text("\n".join(reversed(lines)))
    trained(tmp_path / "one.jsonl", tmp_path / "b", **settings)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def test_of_a_large_corpus_only_a_part_is_read(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(find_inputs([workshop.corpus]).files)
    settings = {"vocab_size": 400, "sample_bytes": 30_000}
    report, _ = trained(workshop.corpus, tmp_path / "all", **settings)
    assert len(report["inputs"]) == count > 2, "all of so few files"
    assert len(report["training_bytes_by_source"]) == 3
    monkeypatch.setattr(train, "_LEAST_FILES", 1)
    report, _ = trained(workshop.corpus, tmp_path / "a", **settings)
    assert 0 < len(report["inputs"]) < count
    names = [entry["name"] for entry in report["inputs"]]
    again, _ = trained(workshop.corpus, tmp_path / "b", seed=7, **settings)
    assert [entry["name"] for entry in again["inputs"]] != names


def test_of_large_files_the_beginnings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of each file is damaged, which only a reader of all of it would notice."""
    (tmp_path / "in").mkdir()
    for name in ("books", "code"):
        texts = [f"{name} {number} of some words" for number in range(2000)]
        with write_texts(tmp_path / "in" / f"{name}.jsonl", texts).open("a") as file:
            file.write("{bad\n")
    settings = {"vocab_size": 300, "sample_bytes": 10_000}
    report, _ = trained(tmp_path / "in", tmp_path / "whole", **settings)
    assert report["left_out"].startswith("2 bad_json")
    monkeypatch.setattr(train, "_MOST_BYTES", 50_000)
    report, _ = trained(tmp_path / "in", tmp_path / "parts", **settings)
    assert report["left_out"] == "" and len(report["inputs"]) == 2


def test_sources_can_be_left_out(workshop: Workshop, tmp_path: Path) -> None:
    settings = {"vocab_size": 400, "sample_bytes": 100_000}
    less = {"exclude_sources": ("StdlibComments",)}
    report, _ = trained(workshop.corpus, tmp_path / "a", **settings, **less)
    assert list(report["training_bytes_by_source"]) == ["PydocTopics", "StdlibDocstrings"]


def test_the_samples_lowest_numbers() -> None:
    texts = [str(number).encode() * 10 for number in range(1000)]
    orders = [texts, texts[::-1], texts + texts]
    kept = []
    for order in orders:
        lowest = LowestNumbers(500)
        for text in order:
            lowest.add(sample_number(text), text, "s")
        kept.append(lowest.texts())
    ranked = sorted(texts, key=sample_number)
    assert kept[0] == kept[1] == kept[2] == [text.decode() for text in ranked[: len(kept[0])]]
    size = sum(map(len, kept[0]))
    assert size >= 500 > size - len(kept[0][-1])


def test_a_model_that_is_not_its_reports_is_refused(
    workshop: Workshop, other_model: Path, tmp_path: Path
) -> None:
    for ending in (".model", ".json"):
        shutil.copy(workshop.model.with_suffix(ending), tmp_path / f"t{ending}")
    check_report(tmp_path / "t.model", identify(tmp_path / "t.model"))
    shutil.copy(other_model, tmp_path / "t.model")
    arguments = ("--tokenizer", tmp_path / "t.model", "--out", tmp_path / "out", "--name", "x")
    assert "is not the model that" in run("tokenize", workshop.corpus, *arguments).sentence()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("handler", "ending"),
    [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)],
    ids=["usual", "ignored"],
)
def test_ctrl_c_ends_the_training_at_once(handler: str, ending: int) -> None:
    program = f"""
import os, signal, threading
from data_pipeline.tokenizer.train import ended_by_ctrl_c
signal.signal(signal.SIGINT, signal.{handler})
with ended_by_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
assert signal.getsignal(signal.SIGINT) == signal.{handler}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (ending, b"")
