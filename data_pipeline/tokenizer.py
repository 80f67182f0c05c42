"""SentencePiece: train, load, check, identify.

The settings make the model lossless: identity normalisation, every space kept, no dummy prefix, bytes for
what is not in the vocabulary. The one exception is a literal U+2581, which is SentencePiece's own sign for a
space. Reserved ids: 0 unknown, 1 beginning (unused), 2 end of document. There is no padding id.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from data_pipeline.errors import DataError
from data_pipeline.files import read_json, sha256_file, to_json, write_atomically
from data_pipeline.records import read_documents
from data_pipeline.sources import InputFile, RecordKeys

MODEL_TYPES = ("unigram", "bpe")
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2

# The trainer drops "sentences" over 4,192 bytes without a word: feed lines, and cut long lines below that.
_MAX_LINE_BYTES = 4000
# The trained scores depend on the number of threads, so it is a constant and not the machine's core count.
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
_HELD_OUT_ONE_IN = 50
_HELD_OUT_DOCUMENTS = 500


@dataclass(frozen=True)
class TrainerSettings:
    """What decides a tokenizer, besides the text."""

    vocab_size: int
    model_type: str = "unigram"
    sample_bytes: int = 100_000_000
    seed: int = 0


@dataclass(frozen=True)
class TokenizerIdentity:
    """What a shard directory states about its tokenizer. `eod_id` ends every document."""

    file: str
    sha256: str
    vocab_size: int
    model_type: str
    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    eod_id: int


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model.

    Raises:
        DataError: the file is missing, is no SentencePiece model, or has no end-of-document id.
    """
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read tokenizer {path}: {error.strerror or error}") from error
    except (RuntimeError, TypeError) as error:
        raise DataError(f"{path} is not a SentencePiece model; train one with train-tokenizer") from error
    if processor.eos_id() < 0:
        raise DataError(
            f"tokenizer {path} has no </s> id to end documents with; train one with train-tokenizer"
        )
    return processor


def identify(path: Path) -> TokenizerIdentity:
    """The identity of a model file that `load_tokenizer` accepts; its normalisation must be the identity.

    Raises:
        DataError: as `load_tokenizer`, or the model would change the text.
    """
    processor = load_tokenizer(path)
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(path.read_bytes())
    normalizer = proto.normalizer_spec
    if normalizer.name != "identity" or normalizer.remove_extra_whitespaces or normalizer.add_dummy_prefix:
        raise DataError(
            f"tokenizer {path} changes the text (normalisation {normalizer.name!r}); "
            f"train one with train-tokenizer"
        )
    return TokenizerIdentity(
        file=path.name,
        sha256=sha256_file(path),
        vocab_size=processor.get_piece_size(),
        model_type=proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type).lower(),
        unk_id=processor.unk_id(),
        bos_id=processor.bos_id(),
        eos_id=processor.eos_id(),
        pad_id=processor.pad_id(),
        eod_id=processor.eos_id(),
    )


def train_tokenizer(
    files: list[InputFile], prefix: Path, settings: TrainerSettings, keys: RecordKeys
) -> tuple[dict[str, Any], bool]:
    """Train PREFIX.model and write what is known about it to PREFIX.json; does nothing if both are up to
    date.

    Returns:
        (the content of PREFIX.json, whether training ran).

    Raises:
        DataError: bad settings or input, or the trained model is not lossless on the held-out documents.
    """
    if settings.model_type not in MODEL_TYPES:
        raise DataError(
            f"--model-type {settings.model_type!r} is unknown; known are {', '.join(MODEL_TYPES)}"
        )
    model_path, report_path = (
        prefix.with_name(prefix.name + ".model"),
        prefix.with_name(prefix.name + ".json"),
    )
    made_from: dict[str, Any] = {
        "settings": asdict(settings) | {"keys": asdict(keys), "trainer": dict(_LOSSLESS)},
        "inputs": [
            {"name": file.name, "size": file.size, "sha256": sha256_file(file.path)} for file in files
        ],
    }
    if model_path.exists() and report_path.exists():
        report = read_json(report_path)
        if all(report.get(key) == value for key, value in made_from.items()) and (
            report.get("sha256") == sha256_file(model_path)
        ):
            return report, False
    training, held_out = _sample(files, settings, keys)
    model = _train(training, settings)
    report = {"file": model_path.name, "sha256": hashlib.sha256(model).hexdigest()}
    report |= _check(model, held_out, prefix) | {
        "training_bytes": sum(len(text.encode()) for text in training)
    }
    write_atomically(model_path, model)
    write_atomically(report_path, to_json(report | made_from))
    return report | made_from, True


def _sample(
    files: list[InputFile], settings: TrainerSettings, keys: RecordKeys
) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): an equal share of `sample_bytes` from the start of every file.

    One document in fifty, chosen by its hash and the seed, is held out.
    """
    training: list[str] = []
    held_out: list[str] = []
    share = -(-settings.sample_bytes // len(files))
    for file in files:
        taken = 0
        for document in read_documents(file.whole, keys):
            text = document.text
            encoded = text.encode()
            key = hashlib.blake2b(encoded, digest_size=8, salt=settings.seed.to_bytes(16, "little")).digest()
            if int.from_bytes(key, "little") % _HELD_OUT_ONE_IN == 0:
                if len(held_out) < _HELD_OUT_DOCUMENTS and text:
                    held_out.append(text)
                continue
            training.append(text)
            taken += len(encoded)
            if taken >= share:
                break
    if not held_out:
        raise DataError(
            f"the {len(training)} documents of the tokenizer sample leave none to check it on; give more text"
        )
    return training, held_out


def _train(texts: list[str], settings: TrainerSettings) -> bytes:
    model = io.BytesIO()
    try:
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
        raise DataError(f"--vocab-size {settings.vocab_size}: SentencePiece says: {reason}") from error
    return model.getvalue()


def _lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            # Four bytes a character at most, so a slice of characters cannot be too long.
            for start in range(0, len(line), _MAX_LINE_BYTES // 4):
                yield line[start : start + _MAX_LINE_BYTES // 4]


def _check(model: bytes, held_out: list[str], prefix: Path) -> dict[str, Any]:
    """Round trip over documents that the training did not see."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = processor.encode(held_out, num_threads=1)
    failures = sum(
        decoded != text.replace("\u2581", " ")
        for decoded, text in zip(processor.decode(ids, num_threads=1), held_out, strict=True)
    )
    tokens = sum(len(document) for document in ids)
    if failures:
        raise DataError(
            f"tokenizer {prefix}: {failures} of {len(held_out)} held-out documents do not decode exactly"
        )
    return {
        "vocab_size": processor.get_piece_size(),
        "held_out_documents": len(held_out),
        "held_out_tokens": tokens,
        "bytes_per_token": round(sum(len(text.encode()) for text in held_out) / tokens, 4),
        "unknown_rate": sum(document.count(UNK_ID) for document in ids) / tokens,
        "round_trip_failures": failures,
    }
