"""Hugging Face `tokenizer.json` files, by the package `tokenizers` (an extra)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError, needs_extra
from data_pipeline.io.files import sha256_file
from data_pipeline.tokenizer.identity import HUGGING_FACE, IdArray, TokenizerIdentity

_CONFIG_NAME = "tokenizer_config.json"


class HuggingFaceTokenizer:
    """Tokenizer of a tokenizer.json, with the methods of `tokenizer.Tokenizer`.

    Its rules are not known, so every text is compared to see what is lost. Special tokens that are written
    out in a text stay text, and none is added.
    """

    lossless = False

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            DataError: the package is missing, or the file is no tokenizer.json.
        """
        self._tokenizer, version = _load(path)
        self.label = f"tokenizers {version}"

    def encode(self, texts: list[str]) -> list[IdArray]:
        """Encode every text, one after the other: a batch would start a thread for every core."""
        encode = self._tokenizer.encode
        return [np.array(encode(text, add_special_tokens=False).ids, dtype=np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def lost(self, texts: list[str], ids: list[IdArray]) -> list[int]:
        """Return the numbers of the texts that do not decode to themselves."""
        pairs = enumerate(zip(texts, ids, strict=True))
        return [number for number, (text, document) in pairs if self.decode(document.tolist()) != text]

    def survivor(self, text: str) -> str:
        """Return the text after encoding and decoding."""
        return self.decode(self.encode([text])[0].tolist())


def identify_huggingface(path: Path, eod_token: str) -> TokenizerIdentity:
    """Identify a tokenizer.json; `eod_token` or tokenizer_config.json names the token that ends documents.

    Raises:
        DataError: the file cannot be loaded, or no token that ends documents is named.
    """
    tokenizer, _ = _load(path)
    names = _named(path.with_name(_CONFIG_NAME))
    if not (eod := eod_token or names.get("eos_token", "")):
        raise DataError(f"no {_CONFIG_NAME} beside {path} names an eos_token; give --eod-token")

    def number(token: str) -> int:
        known = tokenizer.token_to_id(token) if token else None
        return -1 if known is None else int(known)

    if number(eod) < 0:
        raise DataError(f"--eod-token {eod!r} is no token of {path}")
    ids = {kind: number(names.get(f"{kind}_token", "")) for kind in ("unk", "bos", "eos", "pad")}
    return TokenizerIdentity(
        file=path.name,
        sha256=sha256_file(path),
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        model_type=HUGGING_FACE,
        unk_id=ids["unk"],
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["pad"],
        eod_id=number(eod),
    )


def _load(path: Path) -> tuple[Any, str]:
    """Return (the tokenizer, the package's version)."""
    with needs_extra(str(path), "tokenizers"):
        import tokenizers
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read tokenizer {path}: {error.strerror or error}") from error
    except Exception as error:  # the package raises nothing more special
        raise DataError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer, str(tokenizers.__version__)


def _named(path: Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        items = content.items()
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a JSON object") from error
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in items}
    return {key: value for key, value in names.items() if isinstance(value, str)}
