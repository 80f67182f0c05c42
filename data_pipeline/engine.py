"""What turns texts into ids: the seam between the pipeline and the tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data_pipeline.tokenizer import load_tokenizer


class Engine(Protocol):
    """Encodes batches of texts in one thread: the workers are the parallelism."""

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        """The ids of every text, without an end-of-document id."""
        ...


class SentencePieceEngine:
    """SentencePiece's own encoder."""

    def __init__(self, model: Path) -> None:
        """Raises:
        DataError: as `tokenizer.load_tokenizer`.
        """
        self._processor = load_tokenizer(model)

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        """As `Engine.encode`."""
        found: list[npt.NDArray[np.int32]] = self._processor.encode(texts, return_type="numpy", num_threads=1)
        return found


def open_engine(model: Path) -> Engine:
    """The engine for a directory's tokenizer.

    Raises:
        DataError: the model cannot be loaded.
    """
    return SentencePieceEngine(model)
