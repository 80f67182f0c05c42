"""Worker for units of work: pieces of input in, ids and a record out.

One worker does everything for a unit - decompress, hash, parse, split, encode, write - so ids never travel
between processes. The record, written last, makes the unit count; the ids wait beside the record until all
units are there and shards are made of them. The files are a function of the inputs and the options only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    as_json,
    read_checked_json,
    sha256_file,
    to_checked_json,
    write_atomically,
)
from data_pipeline.io.lease import BusyError, Lease
from data_pipeline.io.pool import Progress
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources.containers import hash_of
from data_pipeline.tokenizer.encoder import Encoder, open_encoder
from data_pipeline.tokenizing.encode_unit import UnitMaker
from data_pipeline.tokenizing.plan import Unit
from data_pipeline.tokenizing.unit_files import data_size

_REMEDY = "delete it and run the same tokenize command again"

Report = Callable[[Progress], None]
Record = dict[str, Any]


@dataclass(frozen=True)
class UnitJob:
    """Order to make a unit, or only to check its inputs.

    needs_data: the ids are wanted, for shards that are not there yet.
    finished: records of the unit's inputs, from a finished directory's manifest; then they are only checked.
    """

    unit: Unit
    needs_data: bool = True
    finished: list[Record] | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a `UnitJob`.

    record: the unit's record; None if its inputs were only checked, or another process is at it.
    busy: the sentence that names that process; `certain` as in `lease.BusyError`.
    """

    record: Record | None
    made: bool = False
    busy: str = ""
    certain: bool = False


class UnitWorker:
    """Maker of units, one after the other; a process has one worker and loads the tokenizer once."""

    def __init__(self, engine: str = "auto") -> None:
        """Begin without a tokenizer; `engine` is one of `encoder.ENGINES`."""
        self._engine = engine
        self._path = Path()
        self._encoder: Encoder | None = None

    def __call__(self, job: UnitJob, report: Report) -> Outcome:
        """Make a unit's ids and record, unless they are there or somebody else is making them.

        DataError: an unreadable input or one that changed, a reject under `strict`, or a failed write.
        """
        unit = job.unit
        report(Progress(unit.pieces[0].file.name))
        try:
            if (outcome := _there_already(job, report)) is not None:
                return outcome
            with Lease(
                unit.record_path.with_suffix(".lock"),
                f"making unit {unit.number} of {unit.directory}",
            ):
                # Another may have finished it a moment ago.
                return _there_already(job, report) or self._make(job, report)
        except BusyError as error:
            return Outcome(None, busy=str(error), certain=error.certain)
        except OSError as error:
            raise DataError(
                f"cannot write the shards of {unit.pieces[0].file.name} to {unit.directory}: "
                f"{error.strerror or error}; finished units are kept, run the same command again to continue"
            ) from error

    def _make(self, job: UnitJob, report: Report) -> Outcome:
        unit = job.unit
        maker = UnitMaker(unit, report, self._load(unit.directory / unit.tokenizer.stored_as))
        try:
            inputs = [asdict(maker.read(piece, number)) for number, piece in enumerate(unit.pieces)]
            groups = maker.finish()
        finally:
            maker.discard()
        record = _identity(unit) | {"inputs": inputs, "groups": groups, **maker.counts()}
        # A name that is lost with the machine's power costs its unit another making, and nothing else.
        write_atomically(unit.record_path, to_checked_json(record), durable=False)
        return Outcome(record, made=True)

    def _load(self, path: Path) -> Encoder:
        if self._encoder is None or path != self._path:
            self._path, self._encoder = path, open_encoder(path, self._engine)
        return self._encoder


def _there_already(job: UnitJob, report: Report) -> Outcome | None:
    """Return the outcome of a unit of which nothing has to be made; None if something has."""
    unit, record = job.unit, None
    if job.finished is not None:
        _check_inputs(unit, job.finished)
    elif unit.record_path.exists():
        record = read_record(unit)
        _check_inputs(unit, record["inputs"])
        if _is_incomplete(job, record):
            return None
        if unit.strict and record["rejects"]:
            raise DataError(
                f"{unit.rejects_path} names rejected lines of an earlier run without --strict; "
                f"mend them and choose another --out"
            )
    else:
        return None
    report(
        Progress(unit.pieces[0].file.name, skipped_bytes=sum(piece.size for piece in unit.pieces))
    )
    return Outcome(record)


def _identity(unit: Unit) -> Record:
    return {
        "unit": unit.number,
        "options": as_json(unit.options),
        "tokenizer": unit.tokenizer.sha256,
    }


def read_record(unit: Unit) -> Record:
    """Read the record of a unit that has been made; DataError if it is damaged, or of another run."""
    record = read_checked_json(unit.record_path, _REMEDY)
    if any(record.get(key) != value for key, value in _identity(unit).items()):
        raise DataError(f"{unit.record_path} belongs to another run; choose another --out")
    return record


def has_data(unit: Unit, record: Record) -> bool:
    """Return whether the unit's ids wait beside its record, whole by their size."""
    path, dtype = unit.data_path, dtype_for(unit.tokenizer.vocab_size)
    return path.is_file() and path.stat().st_size == data_size(record, dtype)


def _is_incomplete(job: UnitJob, record: Record) -> bool:
    """Return whether a recorded unit has to be made again, for its ids or its rejects."""
    rejects, digest = job.unit.rejects_path, record["rejects_sha256"]
    if bool(digest) != rejects.is_file() or (digest and sha256_file(rejects) != digest):
        return True
    return job.needs_data and not has_data(job.unit, record)


def _check_inputs(unit: Unit, known: list[dict[str, Any]]) -> None:
    """Raise DataError if an input is not the one that the unit was made from."""
    for piece, old in zip(unit.pieces, known, strict=True):
        stated = old["name"], old["size"], old["start"], old["end"]
        same = stated == (piece.file.name, piece.file.size, piece.start, piece.end)
        if piece.file.version:
            # What the store says is believed: to hash an object is to fetch all of it once more.
            same = same and old["version"] == piece.file.version
        else:
            same = same and old["sha256"] == hash_of(piece)
        if not same:
            raise DataError(
                f"input {piece.file.path} changed after its shards were made; "
                f"restore it or choose another --out"
            )
