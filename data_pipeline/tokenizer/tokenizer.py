"""Tokenizers as the pipeline uses them: load, identify, encode, decode, and find lost text.

A tokenizer that `train-tokenizer` made loses nothing (see `train`). Any other SentencePiece model, or a
`tokenizer.json` of Hugging Face (see `huggingface`), can be chosen too, and text may only be lost
deliberately.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from data_pipeline.errors import DataError
from data_pipeline.io.files import read_json, sha256_file
from data_pipeline.tokenizer.identity import IdArray, TokenizerIdentity

_SPACE_SIGN = "\u2581"


class Tokenizer(Protocol):
    """Tokenizer in its own program: the reference for every faster encoder.

    label: the program and its version.
    lossless: every text but one with a literal U+2581 decodes to itself.
    """

    label: str
    lossless: bool

    def encode(self, texts: list[str]) -> list[IdArray]:
        """Encode every text, in one thread, without an end-of-document id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        ...

    def lost(self, texts: list[str], ids: list[IdArray]) -> list[int]:
        """Return the numbers of the texts, with these ids, that lose something."""
        ...

    def survivor(self, text: str) -> str:
        """Return the part of a text that encoding and decoding keeps."""
        ...


class SentencePieceTokenizer:
    """SentencePiece's own encoder."""

    def __init__(self, path: Path) -> None:
        """Load the model.

        Raises:
            DataError: as `load_tokenizer`.
        """
        self._processor = load_tokenizer(path)
        proto = read_model(path)
        self._keeps_text = not changes_text(proto)
        self.label = f"sentencepiece {sentencepiece.__version__}"
        self.lossless = self._keeps_text and proto.trainer_spec.byte_fallback

    def encode(self, texts: list[str]) -> list[IdArray]:
        """Encode every text, in one thread."""
        ids: list[IdArray] = self._processor.encode(texts, return_type="numpy", num_threads=1)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        text: str = self._processor.decode(list(ids))
        return text

    def lost(self, texts: list[str], ids: list[IdArray]) -> list[int]:
        """Return the numbers of the texts that lose something.

        Without a normaliser the pieces are the text itself, so only text that became the unknown id is lost.
        With a normaliser the decoded text is compared.
        """
        if self._keeps_text:
            unknown = self._processor.unk_id()
            return [number for number, document in enumerate(ids) if np.any(document == unknown)]
        return [
            number
            for number, (text, document) in enumerate(zip(texts, ids, strict=True))
            if self.decode(document.tolist()) != text.replace(_SPACE_SIGN, " ")
        ]

    def survivor(self, text: str) -> str:
        """Return the part of a text that encoding and decoding keeps."""
        if self.lossless:
            return text.replace(_SPACE_SIGN, " ")
        return self.decode(self._processor.encode(text))


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer file.

    Raises:
        DataError: the file cannot be loaded.
    """
    if path.suffix == ".json":
        from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(path)
    return SentencePieceTokenizer(path)


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model.

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


def read_model(path: Path) -> Any:
    """Read the protocol buffer of a model file that `load_tokenizer` accepts."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(path.read_bytes())
    return proto


def changes_text(proto: Any) -> bool:
    """Return whether a SentencePiece model rewrites text. (A dummy prefix does not: decoding removes it.)"""
    normalizer = proto.normalizer_spec
    return normalizer.name != "identity" or normalizer.remove_extra_whitespaces


def identify(path: Path, allow_lossy: bool = False, eod_token: str = "") -> TokenizerIdentity:
    """Identify a tokenizer.

    Args:
        allow_lossy: accept a tokenizer that rewrites text.
        eod_token: the token that ends documents; default: the one that the tokenizer itself names.

    Raises:
        DataError: the tokenizer cannot be loaded, has no end-of-document id, or rewrites text.
    """
    if path.suffix == ".json":
        from data_pipeline.tokenizer.huggingface import identify_huggingface

        return identify_huggingface(path, eod_token)
    processor, proto = load_tokenizer(path), read_model(path)
    if changes_text(proto) and not allow_lossy:
        raise DataError(
            f"tokenizer {path} changes the text (normalisation {proto.normalizer_spec.name!r}); "
            f"train one with train-tokenizer, or give --allow-lossy"
        )
    eod_id = processor.piece_to_id(eod_token) if eod_token else processor.eos_id()
    if eod_token and processor.id_to_piece(eod_id) != eod_token:
        raise DataError(f"--eod-token {eod_token!r} is no piece of {path}")
    return TokenizerIdentity(
        file=path.name,
        sha256=sha256_file(path),
        vocab_size=processor.get_piece_size(),
        model_type=proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type).lower(),
        unk_id=processor.unk_id(),
        bos_id=processor.bos_id(),
        eos_id=processor.eos_id(),
        pad_id=processor.pad_id(),
        eod_id=eod_id,
    )


def check_report(model: Path, identity: TokenizerIdentity) -> None:
    """Compare a model with the report of its training, if that lies beside it.

    Raises:
        DataError: the report is of another model.
    """
    path = model.with_suffix(".json")
    if model == path:
        return
    if path.is_file() and read_json(path).get("sha256") not in (None, identity.sha256):
        raise DataError(
            f"{model} is not the model that {path} describes; train it again, or remove {path.name}"
        )
