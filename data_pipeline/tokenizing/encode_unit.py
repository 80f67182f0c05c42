"""One unit of work, from the input files to token ids on the disk.

Documents go one way: `RecordReader` → `_usable_documents` (which logs everything else) → `_batches`
→ `UnitEncoder` → `UnitData`. The record of the unit, which `make_unit` returns, states the counts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.io.files import Draft, sync_directory, utf8
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import Encoding, InputRecord
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources.discovery import InputFile
from data_pipeline.sources.records import Document, RecordReader, Reject
from data_pipeline.tokenizer.encoder import Encoded, Encoder
from data_pipeline.tokenizer.identity import IdArray, TokenizerIdentity
from data_pipeline.tokenizing.plan import Unit
from data_pipeline.tokenizing.unit_files import Group, UnitData

# Large enough to hide the overhead of a batch, small enough for a smooth progress.
_BATCH_CHARACTERS = 1 << 20
# One document in this many is encoded by both programs, which is some twenty times as slow, ...
_COMPARED_ONE_IN = 1000
# ... and of a long document only its beginning: the first document of a source may be a book.
_COMPARED_CHARACTERS = 1 << 11
_SHOWN_CHARACTERS = 40


def make_unit(unit: Unit, encoder: Encoder, report: Callable[[Progress], None]) -> dict[str, Any]:
    """Encode all documents of a unit, and publish its ids and rejects.

    Args:
        encoder: Encoder of the unit's tokenizer.
        report: Callback for the progress.

    Returns:
        Content of the unit's record: `inputs`, `groups` (of the ids), counts by reason and source,
        and the hash of the file of rejects.

    Raises:
        DataError: If an input is unreadable or has changed, a line is rejected under `strict`, or
            the ids are not those that the tokenizer should make.
    """
    data = UnitData(unit.data_path, dtype_for(unit.tokenizer.vocab_size))
    rejects = _RejectLog(unit)
    checked = UnitEncoder(encoder, unit.tokenizer, unit.options.allow_lossy)
    making = _UnitParts(unit, checked, data, rejects, report=report)
    try:
        inputs = [asdict(_encode_file(making, file)) for file in unit.files]
        rejects_sha256 = rejects.publish()
        groups = data.finish()
    finally:
        data.discard()
        rejects.discard()
    return {
        "inputs": inputs,
        "groups": groups,
        "rejects": dict(sorted(rejects.rejected.items())),
        "unusual": dict(sorted(rejects.unusual.items())),
        "excluded_documents": dict(sorted(rejects.excluded.items())),
        **making.encoder.counts(),
        "rejects_sha256": rejects_sha256,
    }


@dataclass(frozen=True)
class _UnitParts:
    """Objects that the steps of making a unit share."""

    unit: Unit
    encoder: UnitEncoder
    data: UnitData
    rejects: _RejectLog
    report: Callable[[Progress], None]


def _encode_file(making: _UnitParts, file: InputFile) -> InputRecord:
    """Encode one input; return its entry in the manifest."""
    making.report(Progress(file.name))
    reader = RecordReader(file, making.unit.options.keys)
    file_counts = _FileCounts()
    documents = reported = 0
    for batch in _batches(_usable_documents(making, file, reader, file_counts)):
        text_bytes, tokens = _encode_batch(making, batch)
        documents += len(batch)
        bytes_read = reader.input_bytes()
        making.report(
            Progress(
                file.name,
                documents=len(batch),
                tokens=tokens,
                text_bytes=text_bytes,
                input_bytes=bytes_read - reported,
            )
        )
        reported = bytes_read
    making.report(Progress(file.name, input_bytes=file.size - reported))
    return InputRecord(
        name=file.name,
        size=file.size,
        start=0,
        end=file.size,
        sha256=reader.sha256(),
        lines=reader.lines,
        documents=documents,
        rejected=file_counts.rejected,
        unusual=file_counts.unusual,
        damaged="; ".join(file_counts.damage),
        version=file.version,
    )


@dataclass
class _FileCounts:
    """Counts of everything in a file that was not a usual document."""

    rejected: int = 0
    unusual: int = 0
    damage: list[str] = field(default_factory=list)


def _usable_documents(
    making: _UnitParts, file: InputFile, reader: RecordReader, file_counts: _FileCounts
) -> Iterator[Document]:
    """Yield the documents of wanted sources; log and count everything else."""
    for record in reader:
        if isinstance(record, Document):
            if making.unit.options.takes(record.source):
                yield record
            else:
                making.rejects.excluded[record.source] += 1
            continue
        making.rejects.add(file, record)
        if record.lost:
            file_counts.damage.append(f"{record.reason}: {record.detail}")
        elif record.kept:
            file_counts.unusual += 1
        else:
            file_counts.rejected += 1


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about `_BATCH_CHARACTERS`."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _encode_batch(making: _UnitParts, batch: list[Document]) -> tuple[int, int]:
    """Encode and write a batch, the documents of one group together; return (bytes, tokens)."""
    texts = [document.text.encode() for document in batch]
    groups: dict[Group, list[int]] = {}
    for number, (document, text) in enumerate(zip(batch, texts, strict=True)):
        group = (making.unit.options.split_of(text), document.source)
        groups.setdefault(group, []).append(number)
    order = [number for numbers in groups.values() for number in numbers]
    encoded = making.encoder.encode([batch[n] for n in order], [texts[n] for n in order])
    sizes = [sum(len(texts[n]) for n in numbers) for numbers in groups.values()]
    counts = [len(numbers) for numbers in groups.values()]
    making.data.add(encoded, zip(groups, counts, sizes, strict=True))
    return sum(sizes), len(encoded.ids)


class _RejectLog:
    """File of a unit's rejects, created at the first one, and their counts by reason.

    Attributes:
        rejected: Rejects by reason.
        unusual: Kept documents by reason.
        excluded: Documents of unwanted sources, by source.
    """

    def __init__(self, unit: Unit) -> None:
        self.rejected: Counter[str] = Counter()
        self.unusual: Counter[str] = Counter()
        self.excluded: Counter[str] = Counter()
        self._unit = unit
        self._draft: Draft | None = None
        self._digest = hashlib.sha256()

    def add(self, file: InputFile, reject: Reject) -> None:
        """Count a reject and log it; DataError if `strict` forbids it."""
        if self._unit.strict and not reject.kept:
            raise DataError(
                f"{file.path}:{reject.line}: {reject.reason}: {reject.detail}; fix or remove the "
                f"{'file' if reject.lost else 'line'}, or leave out --strict"
            )
        (self.unusual if reject.kept else self.rejected)[reject.reason] += 1
        if self._draft is None:
            self._draft = Draft(self._unit.rejects_path)
        entry = {"file": file.name} | asdict(reject)
        content = utf8(json.dumps(entry, ensure_ascii=False) + "\n")
        self._draft.stream.write(content)
        self._digest.update(content)

    def publish(self) -> str:
        """Publish the file, if there is one; return its SHA-256, or an empty string."""
        if self._draft is None:
            return ""
        self._draft.publish()
        sync_directory(self._unit.rejects_path.parent)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Remove a file that was not published."""
        if self._draft is not None:
            self._draft.discard()


class UnitEncoder:
    """Encoder of one unit's documents that checks the ids.

    The fast encoder is compared with the tokenizer's own program on the first document of every
    source and on a sample of the others. A document that would lose text stops the run, unless
    losses are allowed.

    Args:
        encoder: Encoder of the tokenizer.
        allow_lossy: Whether the tokenizer may lose text.
    """

    def __init__(self, encoder: Encoder, tokenizer: TokenizerIdentity, allow_lossy: bool) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer.file
        self._eod_id = tokenizer.eod_id
        self._allow_lossy = allow_lossy
        self._sources: set[str] = set()
        self._seen = self._compared = self._lossy = 0
        self._documents: Counter[str] = Counter()

    def encode(self, batch: list[Document], texts: list[bytes]) -> Encoded:
        """Encode documents.

        Args:
            texts: Texts of the documents, as UTF-8.

        Raises:
            DataError: If the two programs differ, a document would lose text (unless losses are
                allowed), or an end-of-document id would cut a document in two.
        """
        encoded, quick = self._encoder.encode(texts, self._eod_id)
        self._documents[self._encoder.reference.label] += len(batch) - sum(quick)
        if (fast := self._encoder.fast) is not None:
            self._documents[fast.label] += sum(quick)
        for number, (document, was_quick) in enumerate(zip(batch, quick, strict=True)):
            new = document.source not in self._sources
            if was_quick and (new or self._seen % _COMPARED_ONE_IN == 0):
                self._compare(document, encoded.documents()[number])
            self._seen += 1
        self._check_losses(batch, encoded)
        return encoded

    def counts(self) -> dict[str, Any]:
        """Return documents by encoding program, compared documents, and those that lost text."""
        by_engine = {label: count for label, count in sorted(self._documents.items()) if count}
        return {
            "engines": by_engine,
            "compared_documents": self._compared,
            "lossy_documents": self._lossy,
        }

    def _compare(self, document: Document, ids: IdArray) -> None:
        fast = self._encoder.fast
        assert fast is not None
        reference = self._encoder.reference
        self._sources.add(document.source)
        text = document.text[:_COMPARED_CHARACTERS]
        if len(text) < len(document.text):
            ids = fast.encode([text.encode()], self._eod_id).documents()[0]
        self._compared += 1
        if not np.array_equal(ids, reference.encode([text])[0]):
            raise DataError(
                f"{document.id}: {fast.label} and {reference.label} make different ids of this "
                f"document with {self._tokenizer}; give --engine sentencepiece"
            )

    def _check_losses(self, batch: list[Document], encoded: Encoded) -> None:
        reference = self._encoder.reference
        more_ends = np.count_nonzero(encoded.ids == self._eod_id) > len(batch)
        if reference.lossless and not more_ends:
            return
        ids = encoded.documents()
        texts = [document.text for document in batch]
        lost = [] if reference.lossless else reference.lost(texts, ids)
        self._lossy += len(lost)
        if lost and not self._allow_lossy:
            first = batch[lost[0]]
            decoded = reference.decode(ids[lost[0]].tolist())
            raise DataError(
                f"{first.id}: {self._tokenizer} loses text of this document: "
                f"{_difference(first.text, decoded)}; take a tokenizer with byte fallback, as "
                f"train-tokenizer makes it, or give --allow-lossy"
            )
        for document, document_ids in zip(batch, ids, strict=True):
            if np.any(document_ids == self._eod_id):
                raise DataError(
                    f"{document.id}: {self._tokenizer} makes the end-of-document id "
                    f"{self._eod_id} of text; choose another --eod-token, or another tokenizer"
                )


def sum_counts(records: list[dict[str, Any]]) -> Encoding:
    """Sum the `UnitEncoder.counts` of many units."""
    engines: Counter[str] = Counter()
    for record in records:
        engines.update(record["engines"])
    return {
        "engines": dict(sorted(engines.items())),
        "compared_documents": sum(record["compared_documents"] for record in records),
        "lossy_documents": sum(record["lossy_documents"] for record in records),
    }


def _difference(text: str, decoded: str) -> str:
    """Describe the first difference between a text and its decoded ids."""
    pairs = enumerate(zip(text, decoded, strict=False))
    start = next((number for number, (a, b) in pairs if a != b), len(decoded))
    original = text[start : start + _SHOWN_CHARACTERS]
    replacement = decoded[start : start + _SHOWN_CHARACTERS]
    return f"{original!r} becomes {replacement!r}"
