"""Tokenizers as the pipeline uses them: load, identify, encode, decode, and find lost text.

A tokenizer that `train-tokenizer` made loses nothing (see `train`). Any other SentencePiece model,
or a `tokenizer.json` of Hugging Face, can be used too; text is lost only if the user allows it.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from pydantic import TypeAdapter
from sentencepiece import sentencepiece_model_pb2

from data_pipeline.errors import DataError, how_to_install
from data_pipeline.io.files import read_form, read_regular, refusing, sha256_file
from data_pipeline.tokenizer.identity import HUGGING_FACE, IdArray, TokenizerIdentity

_SPACE_SIGN = "\u2581"
_CONFIG_NAME = "tokenizer_config.json"


_REPORT = TypeAdapter(dict[str, Any])


class Tokenizer(abc.ABC):
    """Tokenizer in its own program: the reference for every faster encoder.

    Attributes:
        label: Program and its version.
        lossless: Whether every text decodes to itself, a literal U+2581 aside.
    """

    label: str
    lossless = False

    @abc.abstractmethod
    def encode(self, texts: list[str]) -> list[IdArray]:
        """Encode every text, in one thread, without an end-of-document id."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def lost(self, texts: list[str], ids: list[IdArray]) -> list[int]:
        """Return the numbers of the texts that do not decode to themselves.

        Args:
            ids: Ids of each text.
        """
        decoded = (self.decode(document.tolist()) for document in ids)
        pairs = enumerate(zip(texts, decoded, strict=True))
        return [number for number, (text, round_trip) in pairs if round_trip != text]

    def survivor(self, text: str) -> str:
        """Return the part of a text that encoding and decoding keeps."""
        return self.decode(self.encode([text])[0].tolist())


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece's own encoder."""

    def __init__(self, path: Path) -> None:
        self._processor = load_tokenizer(path)
        proto = _parsed(self._processor.serialized_model_proto())
        self._keeps_text = not changes_text(proto)
        self.label = f"sentencepiece {sentencepiece.__version__}"
        self.lossless = self._keeps_text and proto.trainer_spec.byte_fallback

    def encode(self, texts: list[str]) -> list[IdArray]:
        ids: list[IdArray] = self._processor.encode(texts, return_type="numpy", num_threads=1)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode(list(ids))
        return text

    def lost(self, texts: list[str], ids: list[IdArray]) -> list[int]:
        """Return the numbers of the texts that lose something.

        Without a normaliser the pieces are the text itself, so only text that became the unknown id
        is lost.

        Args:
            ids: Ids of each text.
        """
        if self._keeps_text:
            unknown = self._processor.unk_id()
            return [number for number, document in enumerate(ids) if np.any(document == unknown)]
        return super().lost([text.replace(_SPACE_SIGN, " ") for text in texts], ids)

    def survivor(self, text: str) -> str:
        return text.replace(_SPACE_SIGN, " ") if self.lossless else super().survivor(text)


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, by the package `tokenizers` (an extra).

    The rules of the tokenizer are unknown, so every text is compared to see what is lost. Special
    tokens that are written out in a text stay text, and none is added.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer, version = _load_huggingface(path)
        self.label = f"tokenizers {version}"

    def encode(self, texts: list[str]) -> list[IdArray]:
        # Texts are encoded one by one: a batch would start a thread for every core.
        encoded = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer file; DataError if it cannot be loaded."""
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model.

    Raises:
        DataError: If the file is no SentencePiece model, or has no end-of-document id.
    """
    with refusing(f"read tokenizer {path}"):
        content = read_regular(path)
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, TypeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not a SentencePiece model; train one with train-tokenizer"
        ) from error
    if processor.eos_id() < 0:
        raise DataError(
            f"tokenizer {path} has no </s> id to end documents with; train one with train-tokenizer"
        )
    return processor


def read_model(path: Path) -> Any:
    """Read the protocol buffer of a model file that `load_tokenizer` accepts."""
    return _parsed(read_regular(path))


def _parsed(model: bytes) -> Any:
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    return proto


def changes_text(proto: Any) -> bool:
    """Return whether a SentencePiece model rewrites text.

    A dummy prefix does not: decoding removes it, unless spaces end pieces.
    """
    normalizer = proto.normalizer_spec
    kept_suffix = proto.trainer_spec.treat_whitespace_as_suffix and normalizer.add_dummy_prefix
    return normalizer.name != "identity" or normalizer.remove_extra_whitespaces or bool(kept_suffix)


def identify(path: Path, allow_lossy: bool = False, eod_token: str = "") -> TokenizerIdentity:
    """Identify a tokenizer.

    Args:
        path: SentencePiece model or tokenizer.json.
        allow_lossy: Whether the tokenizer may rewrite text.
        eod_token: Token that ends documents; empty takes the one that the tokenizer names.

    Raises:
        DataError: If the tokenizer cannot be loaded, has no end-of-document id, or rewrites text.
    """
    if path.suffix == ".json":
        return _identify_huggingface(path, eod_token)
    processor = load_tokenizer(path)
    proto = _parsed(processor.serialized_model_proto())
    if changes_text(proto) and not allow_lossy:
        raise DataError(
            f"tokenizer {path} changes the text (normalisation {proto.normalizer_spec.name!r}, "
            f"treat_whitespace_as_suffix {proto.trainer_spec.treat_whitespace_as_suffix}); train "
            f"one with train-tokenizer, or give --allow-lossy"
        )
    eod_id = processor.piece_to_id(eod_token) if eod_token else processor.eos_id()
    if eod_token and processor.id_to_piece(eod_id) != eod_token:
        raise DataError(f"--eod-token {eod_token!r} is not a token of {path}")
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


def _identify_huggingface(path: Path, eod_token: str) -> TokenizerIdentity:
    """Identify a tokenizer.json, whose end is `eod_token` or named in tokenizer_config.json."""
    tokenizer, _ = _load_huggingface(path)
    names = _special_tokens(path.with_name(_CONFIG_NAME))
    if not (eod := eod_token or names.get("eos_token", "")):
        raise DataError(f"no {_CONFIG_NAME} beside {path} names an eos_token; give --eod-token")

    def number(token: str) -> int:
        token_id = tokenizer.token_to_id(token) if token else None
        return -1 if token_id is None else int(token_id)

    if number(eod) < 0:
        raise DataError(f"--eod-token {eod!r} is not a token of {path}")
    ids = {
        f"{kind}_id": number(names.get(f"{kind}_token", ""))
        for kind in ("unk", "bos", "eos", "pad")
    }
    return TokenizerIdentity(
        file=path.name,
        sha256=sha256_file(path),
        vocab_size=number_of_ids(path),
        model_type=HUGGING_FACE,
        **ids,
        eod_id=number(eod),
    )


def number_of_ids(path: Path) -> int:
    """Return the number of ids of a tokenizer.json, the largest id and one.

    Raises:
        DataError: If the file cannot be loaded, or has no token.
    """
    ids = _load_huggingface(path)[0].get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DataError(f"tokenizer {path} has no token")
    return int(max(ids)) + 1


def _load_huggingface(path: Path) -> tuple[Any, str]:
    """Return the tokenizer and the version of the package."""
    try:
        import tokenizers

        with refusing(f"read tokenizer {path}"):
            tokenizer = tokenizers.Tokenizer.from_str(read_regular(path).decode())
    except DataError:
        raise
    except ImportError as error:
        raise DataError(
            f"{path} needs a package that is not installed ({error}); "
            f"{how_to_install('tokenizers')}"
        ) from error
    except Exception as error:  # the package raises nothing more special
        raise DataError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer, str(tokenizers.__version__)


def _special_tokens(path: Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names."""
    try:
        with refusing(f"read {path}"):
            content = json.loads(read_regular(path)) if path.exists() else {}
        items = content.items()
    except DataError:
        raise
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON object") from error
    contents = {key: v.get("content") if isinstance(v, dict) else v for key, v in items}
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def check_report(model: Path, identity: TokenizerIdentity) -> None:
    """Compare a model with the report of its training beside it, if there is one.

    Raises:
        DataError: If the report is of another model.
    """
    path = model.with_suffix(".json")
    if model == path:
        return
    if path.is_file() and read_form(path, _REPORT).get("sha256") not in (None, identity.sha256):
        raise DataError(
            f"{model} is not the model that {path} describes; train it again, or remove {path.name}"
        )
