"""gigatoken: SentencePiece BPE models, many times as fast as SentencePiece.

This is the one file that knows gigatoken. Its ids are SentencePiece's, but for texts in which a reserved
piece is written out (`</s>`), which it may take for that piece: those are not given to it.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.tokenizer import changes_text, read_model
from data_pipeline.tokenizer_identity import IdArray

# It remembers every word that it has seen, without a limit: after so many characters it begins anew (0.05 s).
# Words that are all different, the worst case, take seven bytes a character.
_RENEW_AFTER = 64 << 20
# How reserved byte pieces begin; there are 256 of them.
_BYTE_PIECES = "<0x"


class GigatokenEncoder:
    """Encodes one text after the other, in one thread."""

    def __init__(self, model: Path) -> None:
        """`model` is one that `why_not` has nothing against."""
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        proto = read_model(model)
        self.label = f"gigatoken {importlib.metadata.version('gigatoken')}"
        reserved = (p.piece for p in proto.pieces if p.type in (p.CONTROL, p.UNKNOWN))
        # One search for all: four times as fast as a search for each.
        self._reserved = re.compile("|".join(map(re.escape, (_BYTE_PIECES, *reserved))))
        self._json = sentencepiece_to_tokenizer_json(model.read_bytes())
        self._backend: Any = None
        self._characters = _RENEW_AFTER

    def takes(self, text: str) -> bool:
        """Whether a text is free of reserved pieces."""
        return self._reserved.search(text) is None

    def encode(self, texts: list[str]) -> list[IdArray]:
        """The ids of every text."""
        found: list[IdArray] = []
        for text in texts:
            if self._characters >= _RENEW_AFTER:
                self._renew()
            self._characters += len(text)
            # As int32, which the ids of other programs are: they go into one array.
            found.append(self._backend.encode(text).view(np.int32))
        return found

    def _renew(self) -> None:
        from gigatoken import Tokenizer

        self._backend = None
        self._backend = Tokenizer.from_json(self._json).backend
        self._characters = 0


def why_not(model: Path) -> str:
    """Why a tokenizer cannot be given to gigatoken, as a clause; empty if it can."""
    if model.suffix == ".json":
        return f"{model} is not a SentencePiece model"
    proto = read_model(model)
    kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type).lower()
    if kind != "bpe":
        return f"{model} is a {kind} model, not BPE"
    if not proto.trainer_spec.byte_fallback:
        return f"{model} has no byte fallback"
    normalizer = proto.normalizer_spec
    if changes_text(proto) or normalizer.add_dummy_prefix or not normalizer.escape_whitespaces:
        return f"{model} changes the text or puts a space before it"
    if any(piece.type in (piece.USER_DEFINED, piece.UNUSED) for piece in proto.pieces):
        return f"{model} has pieces of its user's own"
    try:
        import gigatoken._load.sentencepiece  # noqa: F401
    except ImportError as error:
        return f"gigatoken cannot be imported ({error})"
    return ""
