"""Encoding of one unit of work: documents from the input files to token ids on the disk.

The fast encoder is compared with the tokenizer's own program in every unit: on the first document of every
source and on a sample of the others. A document that would lose text stops the run, unless that is allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.io.files import Draft, sync_directory, utf8
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import InputRecord
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources.discovery import Piece
from data_pipeline.sources.records import Document, RecordReader, Reject, read_documents
from data_pipeline.sources.sampling import LowestNumbers, sample_number
from data_pipeline.tokenizer.encoder import Encoded, Encoder
from data_pipeline.tokenizer.identity import IdArray
from data_pipeline.tokenizing.plan import TokenizeOptions, Unit
from data_pipeline.tokenizing.unit_files import Group, UnitData

# Large enough that a batch's overhead vanishes, small enough that the progress moves.
_BATCH_CHARACTERS = 1 << 20
# Text that is encoded to learn how many tokens a byte makes; a sixth of a second for unigram.
_MEASURED_BYTES = 1 << 18
# What a sample aims at beyond the limit, which then cuts it: an estimate that is low by less loses nothing.
_MARGIN = 1.02
# One document in so many is encoded by both, which is some twenty times as slow, ...
_COMPARED_ONE_IN = 1000
# ... and of a long one its beginning: the first document of a source may be a book.
_COMPARED_CHARACTERS = 1 << 11
_SHOWN_CHARACTERS = 40


class UnitMaker:
    """Reader, encoder and writer of the documents of one unit."""

    def __init__(self, unit: Unit, report: Callable[[Progress], None], encoder: Encoder) -> None:
        self._unit = unit
        self._report = report
        self._encoder = encoder
        tokenizer = unit.tokenizer
        self._checked = UnitEncoder(
            encoder, tokenizer.file, tokenizer.eod_id, unit.options.allow_lossy
        )
        self._data = UnitData(unit.data_path, dtype_for(tokenizer.vocab_size))
        self._rejects: Counter[str] = Counter()
        self._unusual: Counter[str] = Counter()
        self._excluded: Counter[str] = Counter()
        self._log: Draft | None = None
        self._log_digest = hashlib.sha256()
        self._tokens = self._limit = 0

    def read(self, piece: Piece, number: int) -> InputRecord:
        """Encode one piece of the input, up to its quota."""
        unit, reader = self._unit, RecordReader(piece, self._unit.options.keys)
        self._limit = 0 if unit.quotas is None else sum(unit.quotas[: number + 1])
        batch: list[Document] = []
        characters = documents = reported = rejected = unusual = 0
        damage: list[str] = []
        self._report(Progress(piece.file.name))
        share = 1.0 if unit.quotas is None else self._share_of(piece)
        for record in reader:
            if isinstance(record, Reject):
                self._reject(piece, record)
                if record.lost:
                    damage.append(f"{record.reason}: {record.detail}")
                else:
                    rejected, unusual = rejected + (not record.kept), unusual + record.kept
            elif not unit.options.takes(record.source):
                self._excluded[record.source] += 1
            elif share >= 1 or sample_number(record.text.encode()) < share:
                batch.append(record)
                characters += len(record.text)
                if characters >= _BATCH_CHARACTERS:
                    written = self._encode(batch)
                    position = reader.input_bytes()
                    self._report(written.at(piece.file.name, position - reported))
                    documents, reported = documents + written.documents, position
                    batch, characters = [], 0
        if batch:
            written = self._encode(batch)
            documents += written.documents
            self._report(written)
        self._report(Progress(piece.file.name, input_bytes=piece.size - reported))
        file, sha256 = piece.file, reader.sha256()
        return InputRecord(
            *(file.name, file.size, piece.start, piece.end, sha256, reader.lines, documents),
            *(rejected, unusual, "; ".join(damage), file.version),
        )

    def _share_of(self, piece: Piece) -> float:
        """Return the share of a piece's documents that its quota leaves room for, about."""
        options = self._unit.options
        wanted = (d for d in read_documents(piece, options.keys) if options.takes(d.source))
        return _sampled_share(wanted, self._limit - self._tokens, self._encoder)

    def _encode(self, batch: list[Document]) -> Progress:
        """Encode and write a batch, the documents of one group together; return how much was written."""
        texts = [document.text.encode() for document in batch]
        groups: dict[Group, list[int]] = {}
        for number, (document, text) in enumerate(zip(batch, texts, strict=True)):
            groups.setdefault((self._unit.options.split_of(text), document.source), []).append(
                number
            )
        order = [number for numbers in groups.values() for number in numbers]
        encoded = self._checked.encode([batch[n] for n in order], [texts[n] for n in order])
        if self._unit.quotas is not None:
            chosen = self._within_limit(order, encoded.lengths)
            encoded = encoded.only(np.array([number in chosen for number in order]))
            kept = (
                (group, [n for n in numbers if n in chosen]) for group, numbers in groups.items()
            )
            groups = {group: numbers for group, numbers in kept if numbers}
        sizes = {group: sum(len(texts[n]) for n in numbers) for group, numbers in groups.items()}
        self._data.add(
            encoded, ((group, len(numbers), sizes[group]) for group, numbers in groups.items())
        )
        self._tokens += len(encoded.ids)
        documents, tokens = len(encoded.lengths), len(encoded.ids)
        return Progress("", documents=documents, tokens=tokens, text_bytes=sum(sizes.values()))

    def _within_limit(self, order: list[int], lengths: npt.NDArray[np.int32]) -> set[int]:
        """Return the numbers in `order`, of documents with these lengths, that the limit leaves room for."""
        chosen, room = set(), self._limit - self._tokens
        for number, length in sorted(zip(order, lengths.tolist(), strict=True)):
            if length <= room:
                chosen.add(number)
                room -= length
        return chosen

    def _reject(self, piece: Piece, reject: Reject) -> None:
        """Count a reject and log it; `line` counts within the piece until the records are put together."""
        if self._unit.strict and not reject.kept:
            line = reject.line + _lines_before(piece)
            raise DataError(
                f"{piece.file.path}:{line}: {reject.reason}: {reject.detail}; mend or remove the "
                f"{'file' if reject.lost else 'line'}, or leave out --strict"
            )
        (self._unusual if reject.kept else self._rejects)[reject.reason] += 1
        if self._log is None:
            self._log = Draft(self._unit.rejects_path)
        entry = {"file": piece.file.name, "start": piece.start} | asdict(reject)
        content = utf8(json.dumps(entry, ensure_ascii=False) + "\n")
        self._log.stream.write(content)
        self._log_digest.update(content)

    def finish(self) -> list[dict[str, Any]]:
        """Publish the unit's rejects and ids; return the groups of its record."""
        if self._log is not None:
            self._log.publish()
            sync_directory(self._unit.rejects_path.parent)
        return self._data.finish()

    def counts(self) -> dict[str, Any]:
        """Return the counts of the unit's record.

        They are: rejects and unusual documents by reason, documents of excluded sources by source, those of
        `UnitEncoder.counts`, and the hash of the file that names the rejects.
        """
        counters = {
            "rejects": self._rejects,
            "unusual": self._unusual,
            "excluded_documents": self._excluded,
        }
        counts = {name: dict(sorted(counter.items())) for name, counter in counters.items()}
        counts |= self._checked.counts()
        return counts | {"rejects_sha256": self._log_digest.hexdigest() if self._log else ""}

    def discard(self) -> None:
        """Remove what was not published."""
        self._data.discard()
        if self._log is not None:
            self._log.discard()


def wanted_bytes(piece: Piece, report: Callable[[Progress], None], options: TokenizeOptions) -> int:
    """Count the bytes of a piece's text that is of wanted sources."""
    report(Progress(piece.file.name))
    wanted = (d for d in read_documents(piece, options.keys) if options.takes(d.source))
    return sum(len(document.text.encode()) for document in wanted)


def _sampled_share(documents: Iterable[Document], tokens: int, encoder: Encoder) -> float:
    """Return a bound on sample numbers such that the documents below make about `tokens` tokens.

    All documents are read and a few of them encoded.
    """
    measured = LowestNumbers(_MEASURED_BYTES)
    total = 0
    for document in documents:
        text = document.text.encode()
        total += len(text)
        measured.add(sample_number(text), text, document.source)
    texts = [text.encode() for text in measured.texts()]
    made = len(encoder.encode(texts, eod_id=0).ids)  # whatever ends a document
    of = sum(map(len, texts))
    return tokens * _MARGIN * of / (made * total) if made else 0.0


def _lines_before(piece: Piece) -> int:
    """Count the lines that begin before a part of a plain file."""
    lines, left = int(piece.start > 0), piece.start - 1
    with piece.file.open() as stream:
        while left > 0 and (chunk := stream.read(min(left, 1 << 22))):
            left -= len(chunk)
            lines += chunk.count(b"\n")
    return lines


class UnitEncoder:
    """Encoder of one unit's documents that checks what it makes."""

    def __init__(self, encoder: Encoder, tokenizer: str, eod_id: int, allow_lossy: bool) -> None:
        """Begin with no document seen; `tokenizer` is the name for messages."""
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._eod_id = eod_id
        self._allow_lossy = allow_lossy
        self._sources: set[str] = set()
        self._seen = self._compared = self._lossy = 0
        self._documents: Counter[str] = Counter()

    def encode(self, batch: list[Document], texts: list[bytes]) -> Encoded:
        """Encode documents; `texts` are their texts as UTF-8.

        DataError: the two programs differ, or a document would lose text (unless that is allowed), or an
        end-of-document id would cut a document in two.
        """
        quick = self._encoder.quick(texts)
        encoded = self._encoder.encode(texts, self._eod_id, quick)
        self._documents[self._encoder.reference.label] += len(batch) - sum(quick)
        if (fast := self._encoder.fast) is not None:
            self._documents[fast.label] += sum(quick)
        for number, (document, was_quick) in enumerate(zip(batch, quick, strict=True)):
            if was_quick and (
                document.source not in self._sources or self._seen % _COMPARED_ONE_IN == 0
            ):
                self._compare(document, encoded.document(number))
            self._seen += 1
        self._look_for_losses(batch, encoded)
        return encoded

    def counts(self) -> dict[str, Any]:
        """Count documents by the program that encoded them, those compared, and those that lost text."""
        by_engine = {label: count for label, count in sorted(self._documents.items()) if count}
        return {
            "engines": by_engine,
            "compared_documents": self._compared,
            "lossy_documents": self._lossy,
        }

    def _compare(self, document: Document, ids: IdArray) -> None:
        fast, reference = self._encoder.fast, self._encoder.reference
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
        reference = self._encoder.reference
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
        for document, document_ids in zip(batch, ids, strict=True):
            if np.any(document_ids == self._eod_id):
                raise DataError(
                    f"{document.id}: {self._tokenizer} makes the end-of-document id {self._eod_id} of text; "
                    f"choose another --eod-token, or another tokenizer"
                )


def sum_counts(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the `UnitEncoder.counts` of many units."""
    engines: Counter[str] = Counter()
    for record in records:
        engines.update(record["engines"])
    totals = {
        key: sum(record[key] for record in records)
        for key in ("compared_documents", "lossy_documents")
    }
    return {"engines": dict(sorted(engines.items()))} | totals


def _difference(text: str, decoded: str) -> str:
    """Describe the first difference between a text and its decoded ids."""
    at = next(
        (n for n, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), len(decoded)
    )
    shown, instead = (part[at : at + _SHOWN_CHARACTERS] for part in (text, decoded))
    return f"{shown!r} becomes {instead!r}"
