"""Identity of a tokenizer, as a shard directory states it, and the type of ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy.typing as npt
from pydantic import Field

from data_pipeline.io.forms import LARGEST, Count

# The model type of a Hugging Face tokenizer.json.
HUGGING_FACE = "huggingface"
# Names of the copies in a shard directory.
STORED_NAMES = ("tokenizer.model", "tokenizer.json")

IdArray = npt.NDArray[Any]
_Id = Annotated[int, Field(strict=True, ge=-1, lt=LARGEST)]


@dataclass(frozen=True)
class TokenizerIdentity:
    """Identity of a tokenizer: its hash and its reserved ids, -1 if it has no such id.

    Attributes:
        file: Name of the tokenizer's file.
        sha256: SHA-256 of the file.
        vocab_size: Number of ids.
        model_type: SentencePiece's type, or HUGGING_FACE.
        unk_id: Id of unknown text.
        bos_id: Id of a beginning.
        eos_id: Id of an end.
        pad_id: Id of padding.
        eod_id: Id that ends every document.
    """

    file: str
    sha256: str
    vocab_size: Count
    model_type: str
    unk_id: _Id
    bos_id: _Id
    eos_id: _Id
    pad_id: _Id
    eod_id: _Id

    @property
    def stored_as(self) -> str:
        """Return the name of the tokenizer's copy in a shard directory."""
        return STORED_NAMES[self.model_type == HUGGING_FACE]
