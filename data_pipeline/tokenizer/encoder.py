"""What turns texts into ids: a tokenizer, and what encodes for it where that is faster and exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.tokenizer.encoded import Encoded
from data_pipeline.tokenizer.fast_bpe import GigatokenEncoder, why_not
from data_pipeline.tokenizer.identity import IdArray
from data_pipeline.tokenizer.tokenizer import Tokenizer, open_tokenizer

ENGINES = ("auto", "gigatoken", "sentencepiece")


class Engine:
    """Encodes batches of texts in one thread: the workers are the parallelism.

    reference: the tokenizer in its own program.
    fast: what encodes in its place, if anything does.
    """

    def __init__(self, reference: Tokenizer, fast: GigatokenEncoder | None = None) -> None:
        self.reference = reference
        self.fast = fast

    def quick(self, texts: list[bytes]) -> list[bool]:
        """Which texts (UTF-8) the faster program encodes."""
        if self.fast is None:
            return [False] * len(texts)
        return [self.fast.takes(text) for text in texts]

    def encode(self, texts: list[bytes], eod_id: int, taken: list[bool] | None = None) -> Encoded:
        """The ids of texts (UTF-8), each ended by `eod_id`. `taken` is `quick(texts)`, if it is known."""
        taken = self.quick(texts) if taken is None else taken
        if self.fast is not None and all(taken):
            return self.fast.encode(texts, eod_id)
        others = [text.decode() for text, take in zip(texts, taken, strict=True) if not take]
        slow = iter(self.reference.encode(others))
        quick: Iterator[IdArray] = iter(())
        if self.fast is not None:
            ours = [text for text, take in zip(texts, taken, strict=True) if take]
            quick = iter(self.fast.encode(ours, eod_id).documents())
        return Encoded.of([next(quick) if take else next(slow) for take in taken], eod_id)


def why_not_fast(path: Path, name: str = "auto") -> str:
    """Why `auto` leaves a tokenizer to its own program, as a clause; empty if it does not.

    Raises:
        DataError: no engine has this name, or the tokenizer cannot be used with it.
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


def open_engine(path: Path, name: str = "auto") -> Engine:
    """The engine of this name for a tokenizer.

    Raises:
        DataError: the tokenizer cannot be loaded, or not be used with this engine.
    """
    reference = open_tokenizer(path)
    return Engine(reference, None if why_not_fast(path, name) else GigatokenEncoder(path))
