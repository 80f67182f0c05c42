"""One unit of work: pieces of input in, shards and a record out.

One worker does everything for a unit - decompress, parse, split, encode, write - so ids never travel between
processes. For every (split, source) of the unit there is one shard; the record, written last, makes them
count. What is written is a function of the inputs and the options only.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import sentencepiece

from data_pipeline.errors import DataError
from data_pipeline.files import (
    TEMPORARY_SUFFIX,
    publish,
    read_json,
    sha256_file,
    sync,
    sync_directory,
    temporary_path,
    to_json,
    write_atomically,
)
from data_pipeline.manifest import TOKENIZER_NAME, InputRecord
from data_pipeline.plan import Unit
from data_pipeline.pool import Progress
from data_pipeline.records import Document, RecordReader, Reject, read_documents
from data_pipeline.sampling import sample_number, sampled_share
from data_pipeline.shards import ShardWriter, dtype_for, shard_name
from data_pipeline.sources import Piece
from data_pipeline.tokenizer import load_tokenizer

# Large enough that a batch's overhead vanishes, small enough that the progress moves.
_BATCH_CHARACTERS = 1 << 20

_Report = Callable[[Progress], None]


class UnitWorker:
    """Makes units one after the other; a process has one, so that it loads the tokenizer once."""

    def __init__(self) -> None:
        self._path = Path()
        self._processor: sentencepiece.SentencePieceProcessor | None = None

    def __call__(self, unit: Unit, report: _Report) -> tuple[dict[str, Any], bool]:
        """As `make_unit`."""
        return make_unit(unit, report, self._load)

    def _load(self, path: Path) -> sentencepiece.SentencePieceProcessor:
        if self._processor is None or path != self._path:
            self._path, self._processor = path, load_tokenizer(path)
        return self._processor


def make_unit(
    unit: Unit, report: _Report, load: Callable[[Path], sentencepiece.SentencePieceProcessor] = load_tokenizer
) -> tuple[dict[str, Any], bool]:
    """Make one unit's shards and record, unless they are there. `load` gives the tokenizer, if it is needed.

    Returns:
        (the record, whether it was made now).

    Raises:
        DataError: an unreadable input or one that changed, a reject under `strict`, or a failed write.
    """
    report(Progress(unit.pieces[0].file.name))
    known = {
        "unit": unit.number,
        "options": unit.options.as_json(),
        "tokenizer": unit.tokenizer.sha256,
        "inputs": [
            {"name": p.file.name, "size": p.file.size, "start": p.start, "end": p.end, "sha256": _hash(p)}
            for p in unit.pieces
        ],
    }
    if unit.record_path.exists():
        record = read_json(unit.record_path)
        _check_record(unit, record, known)
        if _shards_present(unit, record):
            if unit.strict and record["rejects"]:
                raise DataError(
                    f"{unit.rejects_path} names rejected lines of an earlier run without --strict; "
                    f"mend them and choose another --out"
                )
            report(Progress(unit.pieces[0].file.name, skipped_bytes=sum(p.size for p in unit.pieces)))
            return record, False
    for directory, pattern in (
        (unit.directory, f"{unit.options.name}-*_{unit.number:05d}.*"),
        (unit.record_path.parent, f"{unit.record_path.stem}.*"),
    ):
        for stale in directory.glob(pattern + TEMPORARY_SUFFIX):
            stale.unlink(missing_ok=True)  # left by a run that was killed
    maker = _UnitMaker(unit, report, load(unit.directory / TOKENIZER_NAME))
    try:
        inputs = [asdict(maker.read(piece, i)) for i, piece in enumerate(unit.pieces)]
        shards = maker.finish()
    except OSError as error:
        raise DataError(
            f"cannot write the shards of {unit.pieces[0].file.name} to {unit.directory}: "
            f"{error.strerror or error}; finished shards are kept, run the same command again to continue"
        ) from error
    finally:
        maker.discard()
    for entry, new in zip(inputs, known["inputs"], strict=True):  # type: ignore[call-overload]
        entry["sha256"] = new["sha256"]
    record = known | {"inputs": inputs, "shards": shards, **maker.counts()}
    write_atomically(unit.record_path, to_json(record))
    return record, True


def _hash(piece: Piece) -> str:
    return sha256_file(piece.file.path, piece.start, piece.end)


def _check_record(unit: Unit, record: dict[str, Any], known: dict[str, Any]) -> None:
    for piece, old, new in zip(unit.pieces, record.get("inputs", []), known["inputs"], strict=False):
        if any(old.get(key) != value for key, value in new.items()):
            raise DataError(
                f"input {piece.file.path} changed after its shards were made; "
                f"restore it or choose another --out"
            )
    if any(record.get(key) != known[key] for key in ("unit", "options", "tokenizer")):
        raise DataError(f"{unit.record_path} belongs to another run; choose another --out")


def _shards_present(unit: Unit, record: dict[str, Any]) -> bool:
    if bool(record["rejects"] or record["unusual"]) != unit.rejects_path.is_file():
        return False
    for shard in record["shards"]:
        for ending in ("bin", "idx"):
            path = unit.directory / f"{shard['name']}.{ending}"
            if not path.is_file() or path.stat().st_size != shard[f"{ending}_bytes"]:
                return False
    return True


class _UnitMaker:
    """Documents of one unit on their way into its shards."""

    def __init__(self, unit: Unit, report: _Report, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._unit = unit
        self._report = report
        self._processor = processor
        self._writers: dict[tuple[str, str], ShardWriter] = {}
        self._rejects: Counter[str] = Counter()
        self._unusual: Counter[str] = Counter()
        self._excluded: Counter[str] = Counter()
        self._log: BinaryIO | None = None
        self._log_path = temporary_path(unit.rejects_path)
        self._tokens = self._limit = 0

    def read(self, piece: Piece, number: int) -> InputRecord:
        """Encode one piece of the input, up to its quota."""
        unit, reader = self._unit, RecordReader(piece, self._unit.options.keys)
        self._limit = 0 if unit.quotas is None else sum(unit.quotas[: number + 1])
        batch: list[Document] = []
        characters = documents = reported = 0
        self._report(Progress(piece.file.name))
        share = 1.0 if unit.quotas is None else self._share_of(piece)
        for record in reader:
            if isinstance(record, Reject):
                self._reject(piece, record)
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
        lines = reader.lines if piece.size == piece.file.size else _lines_in(piece)
        return InputRecord(piece.file.name, piece.file.size, piece.start, piece.end, "", lines, documents)

    def _share_of(self, piece: Piece) -> float:
        """Documents with a sample number below this are taken."""
        options = self._unit.options
        wanted = (d for d in read_documents(piece, options.keys) if options.takes(d.source))
        return sampled_share(wanted, self._limit - self._tokens, self._processor)

    def _encode(self, batch: list[Document]) -> Progress:
        """Encode a batch in this thread alone: the workers are the parallelism. Returns what was taken."""
        ids = self._processor.encode([d.text for d in batch], return_type="numpy", num_threads=1)
        if self._unit.quotas is not None:
            batch, ids = self._within_limit(batch, ids)
        groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        sizes = []
        for number, document in enumerate(batch):
            text = document.text.encode()
            sizes.append(len(text))
            groups[self._unit.options.split_of(text), document.source].append(number)
        for (split, source), numbers in groups.items():
            self._writer(split, source).add(
                [ids[number] for number in numbers],
                self._unit.tokenizer.eod_id,
                sum(sizes[number] for number in numbers),
            )
        tokens = sum(len(document) for document in ids) + len(batch)
        self._tokens += tokens
        return Progress("", documents=len(batch), tokens=tokens, text_bytes=sum(sizes))

    def _within_limit(
        self, batch: list[Document], ids: list[npt.NDArray[np.int32]]
    ) -> tuple[list[Document], list[npt.NDArray[np.int32]]]:
        """The documents that the limit leaves room for, one after the other."""
        taken, room = [], self._limit - self._tokens
        for number, document in enumerate(ids):
            if len(document) < room:
                taken.append(number)
                room -= len(document) + 1
        return [batch[number] for number in taken], [ids[number] for number in taken]

    def _reject(self, piece: Piece, reject: Reject) -> None:
        """Count a reject and log it; `line` counts within the piece until the records are put together."""
        if self._unit.strict and not reject.kept:
            line = reject.line + _lines_before(piece)
            raise DataError(
                f"{piece.file.path}:{line}: {reject.reason}: {reject.detail}; mend or remove the line, "
                f"or leave out --strict"
            )
        (self._unusual if reject.kept else self._rejects)[reject.reason] += 1
        if self._log is None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(self._log_path, "wb")  # noqa: SIM115 - closed by finish or discard
        entry = {"file": piece.file.name, "start": piece.start} | asdict(reject)
        self._log.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")

    def _writer(self, split: str, source: str) -> ShardWriter:
        if (split, source) not in self._writers:
            unit = self._unit
            prefix = unit.directory / shard_name(unit.options.name, split, source, unit.number)
            for (_, other), writer in self._writers.items():
                if writer.prefix == prefix:
                    raise DataError(
                        f"sources {other!r} and {source!r} would share the file name {prefix.name}"
                    )
            self._writers[split, source] = ShardWriter(prefix, dtype_for(unit.tokenizer.vocab_size))
        return self._writers[split, source]

    def finish(self) -> list[dict[str, Any]]:
        """Publish the unit's rejects and shards. Returns the shards as `manifest.Shard` in JSON."""
        if self._log is not None:
            sync(self._log)
            self._log.close()
            publish(self._log_path, self._unit.rejects_path)
        shards = [
            {"name": writer.prefix.name, "unit": self._unit.number, "split": split, "source": source}
            | writer.finish()
            for (split, source), writer in sorted(self._writers.items())
        ]
        sync_directory(self._unit.directory)
        return shards

    def counts(self) -> dict[str, dict[str, int]]:
        """What was not taken, or is unusual, by reason or source."""
        counters = {"rejects": self._rejects, "unusual": self._unusual, "excluded_documents": self._excluded}
        return {name: dict(sorted(counter.items())) for name, counter in counters.items()}

    def discard(self) -> None:
        """Remove what was not published."""
        for writer in self._writers.values():
            writer.discard()
        if self._log is not None:
            with contextlib.suppress(OSError):  # on a full disk closing tries to write once more
                self._log.close()
            self._log_path.unlink(missing_ok=True)


def _lines_before(piece: Piece) -> int:
    return _lines_in(Piece(piece.file, 0, piece.start)) if piece.start else 0


def _lines_in(piece: Piece) -> int:
    """Lines that begin in a part of a plain file: at its own beginning, or after a newline."""
    with open(piece.file.path, "rb") as stream:
        stream.seek(max(0, piece.start - 1))
        lines, left = int(piece.start == 0), piece.end - 1 - stream.tell()
        while left > 0 and (chunk := stream.read(min(left, 1 << 22))):
            left -= len(chunk)
            lines += chunk.count(b"\n")
    return lines
