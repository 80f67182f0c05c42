"""gigatoken: SentencePiece BPE models, many times as fast as SentencePiece.

This is the one file that knows gigatoken. Its ids are SentencePiece's, but for texts in which a reserved
piece is written out (`</s>`), which it may take for that piece: those are not given to it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.tokenizer.encoded import Encoded
from data_pipeline.tokenizer.tokenizer import changes_text, read_model

# It remembers every word that it has seen, without a limit. When that has made the process so much larger it
# begins anew (0.05 s, and it learns again: 2 ms a MB of text, if that were every 64 MiB) ...
_MOST_MEMORY = 192 << 20
# ... but not before it has encoded so much text, for a process may be large for other reasons. Words that are
# all different, the worst case, take seven times as much memory as text.
_RENEW_AFTER = 64 << 20
# How reserved byte pieces begin; there are 256 of them.
_BYTE_PIECES = "<0x"


class GigatokenEncoder:
    """Encodes batches of texts, in one thread."""

    def __init__(self, model: Path) -> None:
        """`model` is one that `why_not` has nothing against."""
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        proto = read_model(model)
        self.label = f"gigatoken {importlib.metadata.version('gigatoken')}"
        reserved = (p.piece for p in proto.pieces if p.type in (p.CONTROL, p.UNKNOWN))
        # One search for all: four times as fast as a search for each.
        self._reserved = re.compile("|".join(map(re.escape, (_BYTE_PIECES, *reserved))).encode())
        separator = _separator(proto)
        assert separator is not None
        self._between, self._between_id = separator
        self._json = sentencepiece_to_tokenizer_json(model.read_bytes())
        self._renew()
        self._resident = _resident_bytes()

    def takes(self, text: bytes) -> bool:
        """Whether a text (UTF-8) is free of reserved pieces."""
        return self._reserved.search(text) is None

    def encode(self, texts: list[bytes], eod_id: int) -> Encoded:
        """The ids of texts (UTF-8) that `takes` has nothing against.

        All are encoded in one call, with a control piece behind each that none of them holds: gigatoken makes
        its id of it and begins anew, so that an array for every text and their joining are saved.
        """
        if self._bytes >= _RENEW_AFTER and self._is_large():
            self._renew()
        joined = self._between.join([*texts, b""])
        self._bytes += len(joined)
        # As int32, which the ids of other programs are: they go into one array.
        ids = self._backend.encode(joined).view(np.int32)
        ends = np.flatnonzero(ids == self._between_id)
        if len(ends) != len(texts):
            # A text's end and the piece behind it can together be another control piece.
            return Encoded.of([self._backend.encode(text).view(np.int32) for text in texts], eod_id)
        ids[ends] = eod_id
        return Encoded(ids, np.diff(ends, prepend=-1).astype(np.int32))

    def _renew(self) -> None:
        from gigatoken import Tokenizer

        self._backend: Any = None
        self._backend = Tokenizer.from_json(self._json).backend
        self._bytes = 0

    def _is_large(self) -> bool:
        """Whether the process has grown by too much, or nobody knows."""
        now = _resident_bytes()
        return now is None or self._resident is None or now - self._resident >= _MOST_MEMORY


def _resident_bytes() -> int | None:
    """Memory of this process, if the system tells."""
    try:
        with open("/proc/self/statm", "rb") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _separator(proto: Any) -> tuple[bytes, int] | None:
    """A control piece and its id, to put between texts.

    No beginning of it is an end of it. So if something that begins in a text ends in the piece behind it,
    fewer of them are found than were put there.
    """
    for number, piece in enumerate(proto.pieces):
        content = piece.piece.encode()
        overlaps = any(content.endswith(content[:size]) for size in range(1, len(content)))
        if piece.type == piece.CONTROL and content and not overlaps:
            return content, number
    return None


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
    if _separator(proto) is None:
        return f"{model} has no control piece to put between documents"
    try:
        import gigatoken._load.sentencepiece  # noqa: F401
    except ImportError as error:
        return f"gigatoken cannot be imported ({error})"
    return ""
