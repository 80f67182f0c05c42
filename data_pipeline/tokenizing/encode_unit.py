"""The making of a unit: its documents, from the input files to the ids on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.io.files import publish, sync, temporary_path, utf8
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import InputRecord
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources.discovery import Piece
from data_pipeline.sources.records import Document, RecordReader, Reject, read_documents
from data_pipeline.sources.sampling import LowestNumbers, sample_number
from data_pipeline.tokenizer.encoder import Engine
from data_pipeline.tokenizing.encoding import UnitEncoder
from data_pipeline.tokenizing.plan import Unit
from data_pipeline.tokenizing.unit_files import Group, UnitData

# Large enough that a batch's overhead vanishes, small enough that the progress moves.
_BATCH_CHARACTERS = 1 << 20
# Text that is encoded to learn how many tokens a byte makes; a sixth of a second for unigram.
_MEASURED_BYTES = 1 << 18
# What a sample aims at beyond the limit, which then cuts it: an estimate that is low by less loses nothing.
_MARGIN = 1.02


class UnitMaker:
    """Documents of one unit on their way to the disk."""

    def __init__(self, unit: Unit, report: Callable[[Progress], None], engine: Engine) -> None:
        self._unit = unit
        self._report = report
        self._engine = engine
        tokenizer = unit.tokenizer
        self._encoder = UnitEncoder(engine, tokenizer.file, tokenizer.eod_id, unit.options.allow_lossy)
        dtype = dtype_for(unit.tokenizer.vocab_size)
        self._data = UnitData(unit.data_path, dtype)
        self._rejects: Counter[str] = Counter()
        self._unusual: Counter[str] = Counter()
        self._excluded: Counter[str] = Counter()
        self._log: BinaryIO | None = None
        self._log_digest = hashlib.sha256()
        self._log_path = temporary_path(unit.rejects_path)
        self._tokens = self._limit = 0

    def read(self, piece: Piece, number: int) -> InputRecord:
        """Encode one piece of the input, up to its quota."""
        unit, reader = self._unit, RecordReader(piece, self._unit.options.keys)
        self._limit = 0 if unit.quotas is None else sum(unit.quotas[: number + 1])
        batch: list[Document] = []
        characters = documents = reported = rejected = unusual = 0
        damage = []
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
                    taken = self._encode(batch)
                    position = reader.input_bytes()
                    self._report(taken.at(piece.file.name, position - reported))
                    documents, reported = documents + taken.documents, position
                    batch, characters = [], 0
        if batch:
            taken = self._encode(batch)
            documents += taken.documents
            self._report(taken)
        self._report(Progress(piece.file.name, input_bytes=piece.size - reported))
        read = InputRecord(
            piece.file.name, piece.file.size, piece.start, piece.end, reader.sha256(), reader.lines, documents
        )
        damaged, version = "; ".join(damage), piece.file.version
        return replace(read, rejected=rejected, unusual=unusual, damaged=damaged, version=version)

    def _share_of(self, piece: Piece) -> float:
        """Documents with a sample number below this are taken."""
        options = self._unit.options
        wanted = (d for d in read_documents(piece, options.keys) if options.takes(d.source))
        return _sampled_share(wanted, self._limit - self._tokens, self._engine)

    def _encode(self, batch: list[Document]) -> Progress:
        """Encode and write a batch, the documents of one group together. Returns what was taken of it."""
        texts = [document.text.encode() for document in batch]
        groups: dict[Group, list[int]] = {}
        for number, (document, text) in enumerate(zip(batch, texts, strict=True)):
            groups.setdefault((self._unit.options.split_of(text), document.source), []).append(number)
        order = [number for numbers in groups.values() for number in numbers]
        encoded = self._encoder.encode([batch[n] for n in order], [texts[n] for n in order])
        if self._unit.quotas is not None:
            taken = self._within_limit(order, encoded.lengths)
            encoded = encoded.only(np.array([number in taken for number in order]))
            kept = ((group, [n for n in numbers if n in taken]) for group, numbers in groups.items())
            groups = {group: numbers for group, numbers in kept if numbers}
        sizes = {group: sum(len(texts[n]) for n in numbers) for group, numbers in groups.items()}
        self._data.add(encoded, ((group, len(numbers), sizes[group]) for group, numbers in groups.items()))
        self._tokens += len(encoded.ids)
        documents, tokens = len(encoded.lengths), len(encoded.ids)
        return Progress("", documents=documents, tokens=tokens, text_bytes=sum(sizes.values()))

    def _within_limit(self, order: list[int], lengths: npt.NDArray[np.int32]) -> set[int]:
        """The documents that the limit leaves room for, one after the other.

        Args:
            order: their numbers, as they came. lengths: of the documents in this order.

        """
        taken, room = set(), self._limit - self._tokens
        for number, length in sorted(zip(order, lengths.tolist(), strict=True)):
            if length <= room:
                taken.add(number)
                room -= length
        return taken

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
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(self._log_path, "wb")  # noqa: SIM115 - closed by finish or discard
        entry = {"file": piece.file.name, "start": piece.start} | asdict(reject)
        content = utf8(json.dumps(entry, ensure_ascii=False) + "\n")
        self._log.write(content)
        self._log_digest.update(content)

    def finish(self) -> list[dict[str, Any]]:
        """Publish the unit's rejects and ids. Returns the groups of its record."""
        if self._log is not None:
            sync(self._log)
            self._log.close()
            publish(self._log_path, self._unit.rejects_path)
        return self._data.finish()

    def counts(self) -> dict[str, Any]:
        """What was not taken, or is unusual, by reason or source, and the hash of the file that names it; and
        what `UnitEncoder.counts` says.
        """
        counters = {"rejects": self._rejects, "unusual": self._unusual, "excluded_documents": self._excluded}
        counts = {name: dict(sorted(counter.items())) for name, counter in counters.items()}
        counts |= self._encoder.counts()
        return counts | {"rejects_sha256": self._log_digest.hexdigest() if self._log else ""}

    def discard(self) -> None:
        """Remove what was not published."""
        self._data.discard()
        if self._log is not None:
            with contextlib.suppress(OSError):  # on a full disk closing tries to write once more
                self._log.close()
            self._log_path.unlink(missing_ok=True)


def _sampled_share(documents: Iterable[Document], tokens: int, engine: Engine) -> float:
    """Below which number the documents are to be taken so that they make about `tokens` tokens.

    Reads all documents and encodes a few of them.
    """
    measured = LowestNumbers(_MEASURED_BYTES)
    total = 0
    for document in documents:
        text = document.text.encode()
        total += len(text)
        measured.add(sample_number(text), text, document.source)
    texts = [text.encode() for text in measured.texts()]
    made = len(engine.encode(texts, eod_id=0).ids)  # whatever ends a document
    of = sum(map(len, texts))
    return tokens * _MARGIN * of / (made * total) if made else 0.0


def _lines_before(piece: Piece) -> int:
    return _lines_in(Piece(piece.file, 0, piece.start)) if piece.start else 0


def _lines_in(piece: Piece) -> int:
    """Lines that begin in a part of a plain file: at its own beginning, or after a newline."""
    with piece.file.open() as stream:
        stream.seek(max(0, piece.start - 1))
        lines, left = int(piece.start == 0), piece.end - 1 - stream.tell()
        while left > 0 and (chunk := stream.read(min(left, 1 << 22))):
            left -= len(chunk)
            lines += chunk.count(b"\n")
    return lines
