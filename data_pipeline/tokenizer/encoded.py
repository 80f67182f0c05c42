"""The ids of a batch of documents, in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline.tokenizer.identity import IdArray


@dataclass(frozen=True)
class Encoded:
    """Documents one after the other, each ended by the end-of-document id.

    ids: [tokens] int32. lengths: [documents] int32, tokens of each document, its end included.
    """

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]

    @classmethod
    def of(cls, documents: Sequence[IdArray], eod_id: int) -> Encoded:
        """Of the ids of every document, int32, without their ends."""
        end = np.array([eod_id], dtype=np.int32)
        ids = [part for document in documents for part in (document, end)]
        lengths = np.array([len(document) + 1 for document in documents], dtype=np.int32)
        return cls(np.concatenate([end[:0], *ids]), lengths)

    def document(self, number: int) -> npt.NDArray[np.int32]:
        """A document without its end, as a part of `ids`."""
        start = int(self.lengths[:number].sum(dtype=np.int64))
        return self.ids[start : start + int(self.lengths[number]) - 1]

    def documents(self) -> list[npt.NDArray[np.int32]]:
        """Every document without its end, as parts of `ids`."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        starts = ends - self.lengths
        return [self.ids[a : b - 1] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def only(self, taken: npt.NDArray[np.bool_]) -> Encoded:
        """The documents of which `taken` ([documents]) says so."""
        return Encoded(self.ids[np.repeat(taken, self.lengths)], self.lengths[taken])
