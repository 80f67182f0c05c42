"""Tokenizers as the pipeline uses them: load, identify, encode, decode, and say what was lost.

One that `train-tokenizer` made loses nothing (see `trainer`). Any other SentencePiece model, or a
`tokenizer.json` of Hugging Face (see `huggingface`), can be chosen too; where it loses text, deliberately.
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
    """A tokenizer in its own program: what every faster engine is compared with.

    label: the program and its version.
    lossless: every text but one with a literal U+2581 survives, whatever it is.
    """

    label: str
    lossless: bool

    def encode(self, texts: list[str]) -> list[IdArray]:
        """The ids of every text, in one thread, without an end-of-document id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def lost(self, texts: list[str], ids: list[IdArray]) -> list[int]:
        """Which of these texts, with these ids, do not survive."""
        ...

    def survivor(self, text: str) -> str:
        """What of a text survives."""
        ...


class SentencePieceTokenizer:
    """SentencePiece's own encoder."""

    def __init__(self, path: Path) -> None:
        """Raises:
        DataError: as `load_tokenizer`.
        """
        self._processor = load_tokenizer(path)
        proto = read_model(path)
        self._keeps_text = not changes_text(proto)
        self.label = f"sentencepiece {sentencepiece.__version__}"
        self.lossless = self._keeps_text and proto.trainer_spec.byte_fallback

    def encode(self, texts: list[str]) -> list[IdArray]:
        """As `Tokenizer.encode`."""
        found: list[IdArray] = self._processor.encode(texts, return_type="numpy", num_threads=1)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """As `Tokenizer.decode`."""
        text: str = self._processor.decode(list(ids))
        return text

    def lost(self, texts: list[str], ids: list[IdArray]) -> list[int]:
        """As `Tokenizer.lost`.

        Without a normaliser the pieces are the text itself, so what is lost is what became the unknown id.
        With one the decoded text is compared.
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
        """As `Tokenizer.survivor`."""
        if self.lossless:
            return text.replace(_SPACE_SIGN, " ")
        return self.decode(self._processor.encode(text))


def open_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from its file.

    Raises:
        DataError: it cannot be loaded.
    """
    if path.suffix == ".json":
        from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(path)
    return SentencePieceTokenizer(path)


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


def read_model(path: Path) -> Any:
    """The protocol buffer of a model file that `load_tokenizer` accepts."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(path.read_bytes())
    return proto


def changes_text(proto: Any) -> bool:
    """Whether a SentencePiece model rewrites text before it cuts it. A dummy prefix goes away in decoding."""
    normalizer = proto.normalizer_spec
    return normalizer.name != "identity" or normalizer.remove_extra_whitespaces


def identify(path: Path, allow_lossy: bool = False, eod_token: str = "") -> TokenizerIdentity:
    """The identity of a tokenizer.

    Args:
        allow_lossy: also of one that rewrites text.
        eod_token: what ends documents; default: what the tokenizer itself names.

    Raises:
        DataError: it cannot be loaded or has no end-of-document id, or it rewrites text.
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
    """Is a model the one that its training's report, if it lies beside it, speaks of?

    Raises:
        DataError: it is another.
    """
    path = model.with_suffix(".json")
    if model == path:
        return
    if path.is_file() and read_json(path).get("sha256") not in (None, identity.sha256):
        raise DataError(
            f"{model} is not the model that {path} describes; train it again, or remove {path.name}"
        )
