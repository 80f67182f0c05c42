"""Training of a SentencePiece model that loses nothing.

The settings make the model lossless: identity normalisation, every space kept, no dummy prefix,
bytes for text outside the vocabulary. The one exception is a literal U+2581, which is
SentencePiece's own sign for a space. Reserved ids: 0 unknown, 1 beginning (unused), 2 end of
document. There is no padding id.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import sentencepiece
from pydantic import Field, TypeAdapter
from sentencepiece import sentencepiece_model_pb2
from typing_extensions import NotRequired, TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    REMAKE,
    as_json,
    read_json,
    refuse_unwritable,
    sha256_file,
    to_json,
    write_atomically,
)
from data_pipeline.io.forms import LARGEST, Count, in_form
from data_pipeline.sources.containers import hash_of
from data_pipeline.sources.discovery import InputFile, RecordKeys, is_wanted
from data_pipeline.sources.records import RecordReader, Reject
from data_pipeline.sources.sampling import LowestNumbers, sample_number

MODEL_TYPES = ("bpe", "unigram")
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2

# The trainer silently drops "sentences" over 4,192 bytes, so it gets lines that are cut below that.
_MAX_LINE_BYTES = 4000
# The trained scores depend on the number of threads, so it is not the machine's core count.
_TRAINER_THREADS = 4
_LOSSLESS: Mapping[str, Any] = MappingProxyType(
    {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "byte_fallback": True,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "unk_id": UNK_ID,
        "bos_id": BOS_ID,
        "eos_id": EOS_ID,
        "pad_id": -1,
        "num_threads": _TRAINER_THREADS,
    }
)
# Scores are rounded to multiples of 1/_SCORE_STEPS: their sums are then exact in float32 and
# float64, and another program's tokenizer breaks ties as SentencePiece does.
_SCORE_STEPS = 64
# Tokens for the 256 bytes and the reserved ids.
_BYTES_AND_RESERVED = 256 + 3
# Words in SentencePiece's error for a vocabulary smaller than the characters of the text.
_TOO_MANY_CHARACTERS = "required_chars"
_HELD_OUT_ONE_IN = 50
_HELD_OUT_BYTES = 2_000_000
# Of a corpus much larger than the sample, only files with this many times its bytes are read, but
# at least _LEAST_FILES, so that no source is the whole sample; of more than _MOST_BYTES, only the
# beginnings of the files. The shards of a data set have no size: that many are read, and of each
# its part of those bytes.
_SAMPLED_ONE_IN = 4
_LEAST_FILES = 32
_MOST_BYTES = 4_000_000_000


class _Report(TypedDict):
    """Results of a training that its report names."""

    vocab_size: Count
    bytes_per_token: Annotated[float, Field(strict=True, ge=0, lt=LARGEST)]
    round_trip_failures: Count
    held_out_documents: Count
    damaged: NotRequired[list[str]]
    left_out: NotRequired[str]


_REPORT = TypeAdapter(_Report)


@dataclass(frozen=True)
class TrainerSettings:
    """Options that determine a tokenizer, besides the text.

    Args:
        vocab_size: Number of pieces, the 256 bytes and 3 reserved ids included.
        model_type: One of MODEL_TYPES.
        sample_bytes: Approximate bytes of text to train on.
        seed: Seed that chooses the documents, and those held out for the check.
        sources: Sources to use; empty means all.
        exclude_sources: Sources not to use.

    Raises:
        DataError: If a value is impossible.
    """

    vocab_size: int
    model_type: str = "bpe"
    sample_bytes: int = 100_000_000
    seed: int = 0
    sources: tuple[str, ...] = ()
    exclude_sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            known_types = ", ".join(MODEL_TYPES)
            raise DataError(f"--model-type {self.model_type!r} is unknown; known are {known_types}")
        for option, least, bits in (
            ("vocab_size", 1, 31),
            ("sample_bytes", 1, 63),
            ("seed", 0, 63),
        ):
            if not least <= getattr(self, option) < 1 << bits:
                name = option.replace("_", "-")
                raise DataError(
                    f"--{name} {getattr(self, option)} must be at least {least} and below 2^{bits}"
                )


@dataclass
class _Rejected:
    """Parts of the inputs that are not documents.

    Attributes:
        damaged: Sentences on what inputs have lost.
        counts: Lines and files that are not documents, by reason.
        first: Description of the first reject, with its place.
    """

    damaged: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def add(self, file: InputFile, reject: Reject) -> None:
        """Count a reject of a file, unless its document is used."""
        if reject.lost:
            self.damaged.append(f"{file.name}: {reject.detail}")
        elif not reject.kept:
            self.counts[reject.reason] += 1
            self.first = self.first or f"{file.name} line {reject.line}: {reject.detail}"

    def __str__(self) -> str:
        """Return the counts and the first one; "" without any."""
        counts = ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common())
        return f"{counts} (first {self.first})" if counts else ""


def train_tokenizer(
    files: list[InputFile], prefix: Path, settings: TrainerSettings, keys: RecordKeys
) -> tuple[dict[str, Any], bool]:
    """Train PREFIX.model and write a report on it to PREFIX.json, unless both are up to date.

    Args:
        prefix: Path of the model and the report, without ending.
        keys: Keys of text and source in a record.

    Returns:
        The report, and whether training ran.

    Raises:
        DataError: If settings or input are bad, or the trained model is not lossless on the
            held-out documents.
    """
    if not prefix.name:
        raise DataError(f"--out {prefix} is a directory; give the beginning of a file's name")
    model_path = prefix.with_name(f"{prefix.name}.model")
    report_path = prefix.with_name(f"{prefix.name}.json")
    if not model_path.exists():
        refuse_unwritable(prefix, prefix.parent)
    files = _choose_files(files, settings)
    # A model of another version's trainer is not up to date.
    trainer = dict(_LOSSLESS)
    if settings.model_type == "unigram":
        trainer["score_steps"] = _SCORE_STEPS
    made_from: dict[str, Any] = {
        "settings": as_json(settings) | {"keys": asdict(keys), "trainer": trainer},
        "inputs": [
            {"name": file.name, "start": 0, "end": file.size}
            | ({"version": file.version} if file.version else {"sha256": hash_of(file)})
            for file in files
        ],
    }
    if model_path.exists() and report_path.exists():
        report = read_json(report_path)
        if all(report.get(key) == value for key, value in made_from.items()) and (
            report.get("sha256") == sha256_file(model_path)
        ):
            in_form(report, _REPORT, report_path, REMAKE)
            return report, False
    rejected = _Rejected()
    training, held_out = _sample(files, settings, keys, rejected)
    by_source = training.bytes_by_source()
    model, coverage = _train(training.texts(), settings)
    report = {"file": model_path.name, "sha256": hashlib.sha256(model).hexdigest()}
    report |= {"unk_id": UNK_ID, "bos_id": BOS_ID, "eos_id": EOS_ID, "end_of_document_id": EOS_ID}
    report |= _check(model, held_out, prefix)
    report |= {"damaged": rejected.damaged, "left_out": str(rejected)}
    if coverage is not None:
        report["character_coverage"] = round(coverage, 6)
    report |= {"training_bytes": sum(by_source.values()), "training_bytes_by_source": by_source}
    write_atomically(model_path, model)
    write_atomically(report_path, to_json(report | made_from))
    return report | made_from, True


def _choose_files(files: list[InputFile], settings: TrainerSettings) -> list[InputFile]:
    """Choose the files from which the sample is drawn, in an order that the seed determines."""
    names = {file: os.fsencode(f"{file.name} 0") for file in files}
    shuffled = sorted(files, key=lambda f: sample_number(names[f], settings.seed, b"file"))
    chosen: list[InputFile] = []
    size = 0
    for file in shuffled:
        enough = not file.size or size >= _SAMPLED_ONE_IN * settings.sample_bytes
        if len(chosen) >= _LEAST_FILES and enough:
            break
        chosen.append(file)
        size += file.size
    return sorted(chosen, key=lambda file: file.name)


def _sample(
    files: list[InputFile], settings: TrainerSettings, keys: RecordKeys, rejected: _Rejected
) -> tuple[LowestNumbers, list[str]]:
    """Choose (training texts, held-out texts) by the hash of every document and the seed.

    One document in fifty is held out: the training never sees it, and up to some MB of these
    documents are the check. If the hash holds none of a few documents out, one is held out anyway.
    All else is added to `rejected`.
    """
    training = LowestNumbers(settings.sample_bytes)
    held_out = LowestNumbers(_HELD_OUT_BYTES)
    unused_sources: set[str] = set()
    size = sum(file.size for file in files)
    most_bytes = max(_MOST_BYTES, _SAMPLED_ONE_IN * settings.sample_bytes)
    for file in files:
        bytes_left = math.inf if size <= most_bytes else most_bytes * file.size / size
        if not size:
            bytes_left = _SAMPLED_ONE_IN * settings.sample_bytes / len(files)
        for document in RecordReader(file, keys):
            if isinstance(document, Reject):
                rejected.add(file, document)
                continue
            if bytes_left <= 0:
                break
            text = document.text.encode()
            bytes_left -= len(text)
            if not is_wanted(document.source, settings.sources, settings.exclude_sources):
                unused_sources.add(document.source)
                continue
            is_held_out = sample_number(text, settings.seed, b"held-out") * _HELD_OUT_ONE_IN < 1
            number = sample_number(text, settings.seed)
            (held_out if is_held_out else training).add(number, text, document.source)
    if not held_out.texts() and len(training.texts()) > 1:
        return training, [training.pop_largest()]
    if not held_out.texts() or not training.texts():
        left_out = (
            f"; left out are documents of {', '.join(sorted(unused_sources))}"
            if unused_sources
            else ""
        )
        refused = f"; not documents are {rejected}" if str(rejected) else ""
        refused += f"; damaged is {rejected.damaged[0]}" if rejected.damaged else ""
        raise DataError(
            f"{len(files)} inputs hold {len(training.texts())} documents to train the tokenizer on "
            f"and {len(held_out.texts())} to check it on; give more text{left_out}{refused}"
        )
    return training, held_out.texts()


def _train(texts: list[str], settings: TrainerSettings) -> tuple[bytes, float | None]:
    """Train a model; return it, and the share of characters with a token unless it is the default.

    Where the characters of a text do not fit into the vocabulary, as in Chinese with a small one,
    the most frequent ones get half of it, and bytes carry the others.
    """
    try:
        return _trained(texts, settings), None
    except DataError as error:
        if _TOO_MANY_CHARACTERS not in str(error):
            raise
    if settings.vocab_size < 2 * _BYTES_AND_RESERVED:
        raise DataError(
            f"--vocab-size {settings.vocab_size} is smaller than the characters of this text need; "
            f"give {2 * _BYTES_AND_RESERVED} or more"
        )
    counts = Counter(chain.from_iterable(texts))
    # The trainer itself covers 98 % of a text at least. Lines that end at the others hide them.
    others = counts.most_common()[(settings.vocab_size - _BYTES_AND_RESERVED) // 2 :]
    line_ends = {ord(character): "\n" for character, _ in others}
    coverage = 1 - sum(count for _, count in others) / counts.total()
    return _trained([text.translate(line_ends) for text in texts], settings), coverage


def _trained(texts: list[str], settings: TrainerSettings) -> bytes:
    model = io.BytesIO()
    try:
        with ended_by_ctrl_c():
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(texts),
                model_writer=model,
                model_type=settings.model_type,
                vocab_size=settings.vocab_size,
                minloglevel=2,
                **_LOSSLESS,
            )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].rstrip(". ")
        raise DataError(
            f"--vocab-size {settings.vocab_size}: SentencePiece says: {reason}"
        ) from error
    return round_scores(model.getvalue()) if settings.model_type == "unigram" else model.getvalue()


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, where nothing is half written.

    Python would raise KeyboardInterrupt only when SentencePiece returns, minutes later.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def round_scores(model: bytes) -> bytes:
    """Round the scores of a unigram model's ordinary pieces; those of a BPE model are ranks."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    for piece in proto.pieces:
        if piece.type == piece.NORMAL:
            piece.score = round(piece.score * _SCORE_STEPS) / _SCORE_STEPS
    rounded: bytes = proto.SerializeToString(deterministic=True)
    return rounded


def _lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            # A character has at most four bytes, so no slice is too long.
            for start in range(0, len(line), _MAX_LINE_BYTES // 4):
                yield line[start : start + _MAX_LINE_BYTES // 4]


def _check(model: bytes, held_out: list[str], prefix: Path) -> dict[str, Any]:
    """Check the round trip over held-out documents; return measures of the model."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = processor.encode(held_out, num_threads=1)
    failures = sum(
        decoded != text.replace("\u2581", " ")
        for decoded, text in zip(processor.decode(ids, num_threads=1), held_out, strict=True)
    )
    tokens = sum(len(document) for document in ids)
    if failures:
        raise DataError(
            f"tokenizer {prefix}: {failures} of {len(held_out)} held-out documents do not decode "
            f"exactly"
        )
    return {
        "vocab_size": processor.get_piece_size(),
        "held_out_documents": len(held_out),
        "held_out_tokens": tokens,
        "bytes_per_token": round(sum(len(text.encode()) for text in held_out) / tokens, 4),
        "unknown_rate": sum(document.count(UNK_ID) for document in ids) / tokens,
        "round_trip_failures": failures,
    }
