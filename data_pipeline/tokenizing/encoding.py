"""The encoding of one unit's documents, with the checks that make it safe to believe.

A faster engine is compared with the tokenizer's own program in every unit: the first document of every source
and a sample of the others. And no text is lost without a word.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.sources.records import Document
from data_pipeline.tokenizer.encoded import Encoded
from data_pipeline.tokenizer.encoder import Engine
from data_pipeline.tokenizer.identity import IdArray

# One document in so many is encoded by both, which is some twenty times as slow, ...
_COMPARED_ONE_IN = 1000
# ... and of a long one its beginning: the first document of a source may be a book.
_COMPARED_CHARACTERS = 1 << 11
_SHOWN_CHARACTERS = 40


class UnitEncoder:
    """Documents of one unit to ids."""

    def __init__(self, engine: Engine, tokenizer: str, eod_id: int, allow_lossy: bool) -> None:
        """`tokenizer` is what to call it in messages."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._eod_id = eod_id
        self._allow_lossy = allow_lossy
        self._sources: set[str] = set()
        self._seen = self._compared = self._lossy = 0
        self._documents: Counter[str] = Counter()

    def encode(self, batch: list[Document], texts: list[bytes]) -> Encoded:
        """The ids of documents. `texts` are theirs, as UTF-8.

        Raises:
            DataError: the two programs differ, or a document would lose text (unless that is allowed), or it
            would be cut in two by an end-of-document id.
        """
        taken = self._engine.quick(texts)
        encoded = self._engine.encode(texts, self._eod_id, taken)
        self._documents[self._engine.reference.label] += len(batch) - sum(taken)
        if (fast := self._engine.fast) is not None:
            self._documents[fast.label] += sum(taken)
        for number, (document, was_quick) in enumerate(zip(batch, taken, strict=True)):
            if was_quick and (document.source not in self._sources or self._seen % _COMPARED_ONE_IN == 0):
                self._compare(document, encoded.document(number))
            self._seen += 1
        self._look_for_losses(batch, encoded)
        return encoded

    def counts(self) -> dict[str, Any]:
        """Documents by the program that encoded them, those that two did, and those that lost text."""
        by_engine = {label: count for label, count in sorted(self._documents.items()) if count}
        return {"engines": by_engine, "compared_documents": self._compared, "lossy_documents": self._lossy}

    def _compare(self, document: Document, ids: IdArray) -> None:
        fast, reference = self._engine.fast, self._engine.reference
        assert fast is not None
        self._sources.add(document.source)
        text = document.text[:_COMPARED_CHARACTERS]
        if len(text) < len(document.text):
            ids = fast.encode([text.encode()], self._eod_id).document(0)
        self._compared += 1
        expected = reference.encode([text])[0]
        if not np.array_equal(ids, expected):
            raise DataError(
                f"{document.id}: {fast.label} and {reference.label} make different ids of this document with "
                f"{self._tokenizer}; give --engine sentencepiece"
            )

    def _look_for_losses(self, batch: list[Document], encoded: Encoded) -> None:
        reference = self._engine.reference
        if reference.lossless:
            return
        ids = encoded.documents()
        lost = reference.lost([document.text for document in batch], ids)
        self._lossy += len(lost)
        if lost and not self._allow_lossy:
            text = batch[lost[0]].text
            raise DataError(
                f"{batch[lost[0]].id}: {self._tokenizer} loses text of this document: "
                f"{_difference(text, reference.decode(ids[lost[0]].tolist()))}; take a tokenizer with byte "
                f"fallback, as train-tokenizer makes it, or give --allow-lossy"
            )
        for document, found in zip(batch, ids, strict=True):
            if np.any(found == self._eod_id):
                raise DataError(
                    f"{document.id}: {self._tokenizer} makes the end-of-document id {self._eod_id} of text; "
                    f"choose another --eod-token, or another tokenizer"
                )


def sum_counts(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The `UnitEncoder.counts` of many units together."""
    engines: Counter[str] = Counter()
    for record in records:
        engines.update(record["engines"])
    totals = {
        key: sum(record[key] for record in records) for key in ("compared_documents", "lossy_documents")
    }
    return {"engines": dict(sorted(engines.items()))} | totals


def _difference(text: str, decoded: str) -> str:
    """Where a text and what is decoded part, in words."""
    at = next((n for n, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), len(decoded))
    shown, instead = (part[at : at + _SHOWN_CHARACTERS] for part in (text, decoded))
    return f"{shown!r} becomes {instead!r}"
