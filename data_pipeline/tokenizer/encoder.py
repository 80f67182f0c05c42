"""Encoders from texts to token ids: the tokenizer's own program, and gigatoken if ids are equal.

gigatoken encodes SentencePiece BPE models many times as fast as SentencePiece. Only this module
knows gigatoken; without the package everything works, more slowly. gigatoken may mistake a reserved
piece that is written out in a text (`</s>`) for the control piece, so SentencePiece encodes such
texts.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.io.files import read_regular
from data_pipeline.tokenizer.identity import IdArray
from data_pipeline.tokenizer.tokenizer import Tokenizer, changes_text, open_tokenizer, read_model

ENGINES = ("auto", "gigatoken", "sentencepiece")

# gigatoken caches every word that it has seen, without a limit. When the process has grown by this
# much, the encoder is made anew (0.05 s; filling the cache again costs 2 ms a MB of text if done
# every 64 MiB) ...
_MOST_MEMORY = 192 << 20
# ... but not before it has encoded this much text: a process may be large for other reasons. In the
# worst case, all words different, the cache takes seven times the memory of the text.
_RENEW_AFTER = 64 << 20
# Beginning of the 256 reserved byte pieces.
_BYTE_PIECES = "<0x"


@dataclass(frozen=True)
class Encoded:
    """Token ids of a batch of documents, each ended by the end-of-document id.

    Attributes:
        ids: [tokens] int32, ids of one document after the other.
        lengths: [documents] int32, tokens of each document, its end-of-document id included.
    """

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]

    @classmethod
    def of(cls, documents: Sequence[IdArray], eod_id: int) -> Encoded:
        """Join the ids of every document.

        Args:
            documents: Ids of each document, int32.
            eod_id: Id to append to each document.
        """
        end = np.array([eod_id], dtype=np.int32)
        ids = [part for document in documents for part in (document, end)]
        lengths = np.array([len(document) + 1 for document in documents], dtype=np.int32)
        return cls(np.concatenate([end[:0], *ids]), lengths)

    def documents(self) -> list[npt.NDArray[np.int32]]:
        """Return every document without its end, as views of `ids`."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        starts = ends - self.lengths
        return [
            self.ids[start : end - 1]
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]


class GigatokenEncoder:
    """Encoder of batches of texts by gigatoken, in one thread.

    Args:
        model: Model for which `why_not` returns no reason.
    """

    def __init__(self, model: Path) -> None:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        proto = read_model(model)
        self.label = f"gigatoken {importlib.metadata.version('gigatoken')}"
        reserved = (p.piece for p in proto.pieces if p.type in (p.CONTROL, p.UNKNOWN))
        # One search for all pieces is four times as fast as one for each.
        self._reserved = re.compile("|".join(map(re.escape, (_BYTE_PIECES, *reserved))).encode())
        separator = _separator(proto)
        assert separator is not None
        self._between, self._between_id = separator
        self._json = sentencepiece_to_tokenizer_json(read_regular(model))
        self._renew()
        self._resident = _resident_bytes()

    def takes(self, text: bytes) -> bool:
        """Return whether a text (UTF-8) is free of reserved pieces."""
        return self._reserved.search(text) is None

    def encode(self, texts: list[bytes], eod_id: int) -> Encoded:
        """Encode texts (UTF-8) that `takes` accepts.

        All texts are encoded in one call, each followed by a control piece that none of them
        contains: gigatoken encodes the piece as its id and starts afresh. This saves an array per
        text and the joining.

        Args:
            eod_id: Id that ends each text.
        """
        if self._bytes >= _RENEW_AFTER and self._is_large():
            self._renew()
        joined = self._between.join([*texts, b""])
        self._bytes += len(joined)
        # As int32, the type of the ids of other programs: all go into one array.
        ids = self._backend.encode(joined).view(np.int32)
        ends = np.flatnonzero(ids == self._between_id)
        if len(ends) != len(texts):
            # A text's end and the piece behind it can together be another control piece.
            return Encoded.of([self._backend.encode(text).view(np.int32) for text in texts], eod_id)
        ids[ends] = eod_id
        return Encoded(ids, np.diff(ends, prepend=-1).astype(np.int32))

    def _renew(self) -> None:
        from gigatoken import Tokenizer

        # Free the old encoder before the new one is made.
        self._backend: Any = None
        self._backend = Tokenizer.from_json(self._json).backend
        self._bytes = 0

    def _is_large(self) -> bool:
        """Return whether the process has grown by too much, or its size is unknown."""
        now = _resident_bytes()
        return now is None or self._resident is None or now - self._resident >= _MOST_MEMORY


class Encoder:
    """Encoder of batches of texts in one thread: the worker processes are the parallelism.

    Args:
        reference: Tokenizer in its own program.
        fast: gigatoken, if the model allows it.
    """

    def __init__(self, reference: Tokenizer, fast: GigatokenEncoder | None = None) -> None:
        self.reference = reference
        self.fast = fast

    def encode(self, texts: list[bytes], eod_id: int) -> tuple[Encoded, list[bool]]:
        """Encode texts (UTF-8).

        Args:
            eod_id: Id that ends each text.

        Returns:
            The ids, and for every text whether the fast program encoded it.
        """
        quick = [self.fast is not None and self.fast.takes(text) for text in texts]
        if self.fast is not None and all(quick):
            return self.fast.encode(texts, eod_id), quick
        slow_texts = [
            text.decode() for text, is_quick in zip(texts, quick, strict=True) if not is_quick
        ]
        by_reference = iter(self.reference.encode(slow_texts))
        by_fast: Iterator[IdArray] = iter(())
        if self.fast is not None:
            quick_texts = [text for text, is_quick in zip(texts, quick, strict=True) if is_quick]
            by_fast = iter(self.fast.encode(quick_texts, eod_id).documents())
        ids = [next(by_fast if is_quick else by_reference) for is_quick in quick]
        return Encoded.of(ids, eod_id), quick


def open_encoder(path: Path, name: str = "auto") -> Encoder:
    """Open the encoder of a tokenizer; DataError if it cannot be used.

    Args:
        name: One of ENGINES.
    """
    reference = open_tokenizer(path)
    return Encoder(reference, None if why_not_fast(path, name) else GigatokenEncoder(path))


def why_not_fast(path: Path, name: str = "auto") -> str:
    """Return, as a clause, why gigatoken is not used for a tokenizer; empty if it is.

    Args:
        name: One of ENGINES.

    Raises:
        DataError: If there is no such engine, or the tokenizer cannot be used with it.
    """
    if name not in ENGINES:
        raise DataError(f"--engine {name!r} is unknown; known are {', '.join(ENGINES)}")
    if name == "sentencepiece":
        if path.suffix == ".json":
            raise DataError(
                f"--engine sentencepiece: {path} is not a SentencePiece model; leave --engine out"
            )
        return "--engine sentencepiece was given"
    if (reason := why_not(path)) and name == "gigatoken":
        raise DataError(f"--engine gigatoken: {reason}; leave --engine out")
    return reason


def why_not(model: Path) -> str:
    """Return, as a clause, why gigatoken cannot use a tokenizer; empty if it can."""
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
        return f"{model} has user-defined or unused tokens"
    if _separator(proto) is None:
        return f"{model} has no control token to put between documents"
    try:
        import gigatoken._load.sentencepiece  # noqa: F401
    except ImportError as error:
        return f"gigatoken cannot be imported ({error})"
    return ""


def _separator(proto: Any) -> tuple[bytes, int] | None:
    """Return a control piece and its id, to put between texts.

    No proper prefix of the piece is also its suffix. So if a piece that begins in a text reaches
    into the separator behind it, fewer separators are found than were put in.
    """
    for number, piece in enumerate(proto.pieces):
        content = piece.piece.encode()
        overlaps = any(content.endswith(content[:size]) for size in range(1, len(content)))
        if piece.type == piece.CONTROL and content and not overlaps:
            return content, number
    return None


def _resident_bytes() -> int | None:
    """Return the resident memory of this process; None if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
